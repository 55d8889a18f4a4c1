"""Dispatchers: the components that take messages from their buses and run the functions for them."""

from trio_wow.dispatch._command import CommandDispatcher as CommandDispatcher
from trio_wow.dispatch._command import conflict_retry as conflict_retry
from trio_wow.dispatch._dispatcher import MessageDispatcher as MessageDispatcher
from trio_wow.dispatch._event import EventDispatcher as EventDispatcher
from trio_wow.dispatch._event import ProcessorOptions as ProcessorOptions
from trio_wow.dispatch._event import ProjectionDispatcher as ProjectionDispatcher
from trio_wow.dispatch._event import SagaDispatcher as SagaDispatcher
from trio_wow.dispatch._failures import FailureRetries as FailureRetries
from trio_wow.dispatch._filters import Filter as Filter
from trio_wow.dispatch._filters import FilterChain as FilterChain
from trio_wow.dispatch._filters import Handler as Handler
from trio_wow.dispatch._filters import Handling as Handling
from trio_wow.dispatch._filters import Outcome as Outcome
from trio_wow.dispatch._filters import Retry as Retry
from trio_wow.dispatch._filters import StageNotifier as StageNotifier
from trio_wow.dispatch._filters import is_retryable as is_retryable
from trio_wow.dispatch._processors import ProcessorDispatcher as ProcessorDispatcher
from trio_wow.dispatch._progress import CatchUp as CatchUp
from trio_wow.dispatch._registry import FunctionRegistry as FunctionRegistry
from trio_wow.dispatch._results import CommandResults as CommandResults
from trio_wow.dispatch._results import CommandWait as CommandWait
from trio_wow.dispatch._results import StagePart as StagePart
from trio_wow.dispatch._scheduling import GroupedScheduling as GroupedScheduling
from trio_wow.dispatch._snapshot import SnapshotDispatcher as SnapshotDispatcher
from trio_wow.dispatch._waits import WAITS as WAITS
from trio_wow.dispatch._waits import waits_for as waits_for

__all__ = [
    "WAITS",
    "CatchUp",
    "CommandDispatcher",
    "CommandResults",
    "CommandWait",
    "EventDispatcher",
    "FailureRetries",
    "Filter",
    "FilterChain",
    "FunctionRegistry",
    "GroupedScheduling",
    "Handler",
    "Handling",
    "MessageDispatcher",
    "Outcome",
    "ProcessorDispatcher",
    "ProcessorOptions",
    "ProjectionDispatcher",
    "Retry",
    "SagaDispatcher",
    "SnapshotDispatcher",
    "StageNotifier",
    "StagePart",
    "conflict_retry",
    "is_retryable",
    "waits_for",
]
