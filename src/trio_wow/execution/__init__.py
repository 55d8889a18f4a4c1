"""Keyed execution: items of one key in order, different keys in parallel; and in groups. Knows nothing of messages."""

from trio_wow.execution._errors import split_cancelled as split_cancelled
from trio_wow.execution._executor import KeyedExecutor as KeyedExecutor
from trio_wow.execution._executor import synchronous as synchronous
from trio_wow.execution._plain import is_async as is_async
from trio_wow.execution._plain import refuse_awaitable as refuse_awaitable
from trio_wow.execution._pool import ExecPool as ExecPool
from trio_wow.execution._pool import ExecPoolStatistics as ExecPoolStatistics
from trio_wow.execution._pool import PoolPlace as PoolPlace
from trio_wow.execution._profile import AdaptiveSettings as AdaptiveSettings
from trio_wow.execution._profile import ExecClass as ExecClass
from trio_wow.execution._profile import ExecProfile as ExecProfile
from trio_wow.execution._profile import FunctionStatistics as FunctionStatistics
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
from trio_wow.execution._threads import inline as inline
from trio_wow.execution._threads import lent as lent
from trio_wow.execution._user_call import in_user_call as in_user_call
from trio_wow.execution._user_call import user_call as user_call

__all__ = [
    "AdaptiveSettings",
    "AggregateScheduler",
    "AggregateSchedulerStatistics",
    "AggregateSchedulerSupplier",
    "Backlog",
    "BatchSource",
    "BorrowedAggregateSchedulerSupplier",
    "DemandSource",
    "DispatchStatistics",
    "ExecClass",
    "ExecPool",
    "ExecPoolStatistics",
    "ExecProfile",
    "FunctionStatistics",
    "KeyedExecutor",
    "KeyedExecutorStatistics",
    "PoolPlace",
    "WorkerStatistics",
    "blocking",
    "direct",
    "group_key",
    "in_user_call",
    "inline",
    "is_async",
    "lent",
    "refuse_awaitable",
    "split_cancelled",
    "synchronous",
    "user_call",
]
