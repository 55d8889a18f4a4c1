"""Keyed execution: items of one key in order, different keys in parallel. Knows nothing of messages."""

from trio_wow.execution._errors import split_cancelled as split_cancelled
from trio_wow.execution._executor import KeyedExecutor as KeyedExecutor
from trio_wow.execution._plain import is_async as is_async
from trio_wow.execution._plain import refuse_awaitable as refuse_awaitable
from trio_wow.execution._source import BatchSource as BatchSource
from trio_wow.execution._source import DemandSource as DemandSource
from trio_wow.execution._statistics import Backlog as Backlog
from trio_wow.execution._statistics import DispatchStatistics as DispatchStatistics
from trio_wow.execution._statistics import KeyedExecutorStatistics as KeyedExecutorStatistics
from trio_wow.execution._statistics import WorkerStatistics as WorkerStatistics
from trio_wow.execution._threads import blocking as blocking
from trio_wow.execution._threads import direct as direct
from trio_wow.execution._user_call import is_in_turn as is_in_turn
from trio_wow.execution._user_call import user_call as user_call

__all__ = [
    "Backlog",
    "BatchSource",
    "DemandSource",
    "DispatchStatistics",
    "KeyedExecutor",
    "KeyedExecutorStatistics",
    "WorkerStatistics",
    "blocking",
    "direct",
    "is_async",
    "is_in_turn",
    "refuse_awaitable",
    "split_cancelled",
    "user_call",
]
