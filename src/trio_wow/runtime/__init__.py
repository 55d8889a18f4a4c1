"""Lifecycle: an ordered start and stop of components under one deadline, and the leases that say what is running."""

from trio_wow.runtime._admission import ActivityLease as ActivityLease
from trio_wow.runtime._admission import Admission as Admission
from trio_wow.runtime._component import RuntimeComponent as RuntimeComponent
from trio_wow.runtime._component import RuntimeContext as RuntimeContext
from trio_wow.runtime._runtime import Runtime as Runtime
from trio_wow.runtime._runtime import RuntimeState as RuntimeState

__all__ = ["ActivityLease", "Admission", "Runtime", "RuntimeComponent", "RuntimeContext", "RuntimeState"]
