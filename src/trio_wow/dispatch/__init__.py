"""Dispatchers: the components that take messages from their buses and run the functions for them."""

from trio_wow.dispatch._command import CommandDispatcher as CommandDispatcher
from trio_wow.dispatch._dispatcher import MessageDispatcher as MessageDispatcher
from trio_wow.dispatch._event import EventDispatcher as EventDispatcher
from trio_wow.dispatch._event import ProjectionDispatcher as ProjectionDispatcher
from trio_wow.dispatch._processors import ProcessorDispatcher as ProcessorDispatcher
from trio_wow.dispatch._progress import CatchUp as CatchUp
from trio_wow.dispatch._results import CommandResults as CommandResults
from trio_wow.dispatch._results import CommandWait as CommandWait
from trio_wow.dispatch._saga import SagaDispatcher as SagaDispatcher
from trio_wow.dispatch._state import SnapshotDispatcher as SnapshotDispatcher
from trio_wow.dispatch._state import StateEventDispatcher as StateEventDispatcher

__all__ = [
    "CatchUp",
    "CommandDispatcher",
    "CommandResults",
    "CommandWait",
    "EventDispatcher",
    "MessageDispatcher",
    "ProcessorDispatcher",
    "ProjectionDispatcher",
    "SagaDispatcher",
    "SnapshotDispatcher",
    "StateEventDispatcher",
]
