"""Keyed execution: items of one key in order, different keys in parallel; and in groups. Knows nothing of messages."""

from trio_wow.execution._errors import split_cancelled as split_cancelled
from trio_wow.execution._executor import KeyedExecutor as KeyedExecutor
from trio_wow.execution._plain import is_async as is_async
from trio_wow.execution._plain import refuse_awaitable as refuse_awaitable
from trio_wow.execution._scheduler import AggregateScheduler as AggregateScheduler
from trio_wow.execution._scheduler import AggregateSchedulerStatistics as AggregateSchedulerStatistics
from trio_wow.execution._scheduler import AggregateSchedulerSupplier as AggregateSchedulerSupplier
from trio_wow.execution._scheduler import BorrowedAggregateSchedulerSupplier as BorrowedAggregateSchedulerSupplier
from trio_wow.execution._scheduler import group_key as group_key
from trio_wow.execution._source import BatchSource as BatchSource
from trio_wow.execution._source import DemandSource as DemandSource
from trio_wow.execution._statistics import Backlog as Backlog
from trio_wow.execution._statistics import DispatchStatistics as DispatchStatistics
from trio_wow.execution._statistics import KeyedExecutorStatistics as KeyedExecutorStatistics
from trio_wow.execution._statistics import WorkerStatistics as WorkerStatistics
from trio_wow.execution._threads import blocking as blocking
from trio_wow.execution._threads import direct as direct
from trio_wow.execution._user_call import user_call as user_call

__all__ = [
    "AggregateScheduler",
    "AggregateSchedulerStatistics",
    "AggregateSchedulerSupplier",
    "Backlog",
    "BatchSource",
    "BorrowedAggregateSchedulerSupplier",
    "DemandSource",
    "DispatchStatistics",
    "KeyedExecutor",
    "KeyedExecutorStatistics",
    "WorkerStatistics",
    "blocking",
    "direct",
    "group_key",
    "is_async",
    "refuse_awaitable",
    "split_cancelled",
    "user_call",
]
