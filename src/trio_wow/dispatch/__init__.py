"""Dispatchers: the components that take messages from their buses and run the functions for them."""

from trio_wow.dispatch._command import CommandDispatcher as CommandDispatcher
from trio_wow.dispatch._command import ResultSink as ResultSink
from trio_wow.dispatch._dispatcher import MessageDispatcher as MessageDispatcher
from trio_wow.dispatch._event import EventDispatcher as EventDispatcher
from trio_wow.dispatch._event import ProjectionDispatcher as ProjectionDispatcher
from trio_wow.dispatch._saga import SagaDispatcher as SagaDispatcher

__all__ = [
    "CommandDispatcher",
    "EventDispatcher",
    "MessageDispatcher",
    "ProjectionDispatcher",
    "ResultSink",
    "SagaDispatcher",
]
