"""Lifecycle: an ordered start and stop of components under one deadline, and the leases that say what is running."""

from trio_wow.runtime._admission import ActivityLease as ActivityLease
from trio_wow.runtime._admission import Admission as Admission
from trio_wow.runtime._admission import checkpoint_in_turn as checkpoint_in_turn
from trio_wow.runtime._component import RuntimeComponent as RuntimeComponent
from trio_wow.runtime._component import RuntimeContext as RuntimeContext
from trio_wow.runtime._runtime import Runtime as Runtime
from trio_wow.runtime._state import ComponentStatistics as ComponentStatistics
from trio_wow.runtime._state import LeaseStatistics as LeaseStatistics
from trio_wow.runtime._state import RuntimeState as RuntimeState
from trio_wow.runtime._state import RuntimeStatistics as RuntimeStatistics

__all__ = [
    "ActivityLease",
    "Admission",
    "ComponentStatistics",
    "LeaseStatistics",
    "Runtime",
    "RuntimeComponent",
    "RuntimeContext",
    "RuntimeState",
    "RuntimeStatistics",
    "checkpoint_in_turn",
]
