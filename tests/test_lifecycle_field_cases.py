"""Field cases of the end of a runtime: threads that do not return, failed starts, constant traffic, hot keys."""

import gc
import logging
import socket
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import trio
from chain_domain import Chain, Step, Stepped, Steps, registry_of
from runtime_support import Part, quick, sleeping
from support import ListSource, PythonProcess, collect, itself
from thread_support import Gates, until
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import CommandGateway, event_processor, on_event
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus, MessageExchange
from trio_wow.dispatch import CommandDispatcher, EventDispatcher, FilterChain, ProjectionDispatcher, Retry
from trio_wow.domain import Domain
from trio_wow.errors import AdmissionClosedError, HandlerExitError, ShutdownDeadlineError
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.execution import KeyedExecutor, blocking, direct
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import RuntimeContext

Pin = Literal["direct", "blocking"]
PIN = {"direct": direct, "blocking": blocking}


class Dispatching(Part):
    """A component that dispatches a source to a handler, without messages."""

    def __init__(self, name: str, source: Any, handler: Callable[[Any], object], log: list[str] | None = None) -> None:
        super().__init__(name, [] if log is None else log)
        self.source = source
        self.handler = handler

    def start(self) -> None:
        super().start()
        self.spawn(self._dispatch, "receiver")

    async def _dispatch(self) -> None:
        assert self.context is not None
        await self.context.executor.dispatch(self.source, key=itself, handler=self.handler)


class TestThreads:
    @pytest.mark.parametrize("pin", ["direct", "blocking"])
    async def test_fs10_the_deadline_does_not_wait_for_a_thread_and_names_it(
        self, pin: Pin, gates: Gates, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("trio_wow.runtime", "trio_wow.execution"):
            caplog.set_level(logging.WARNING, name)
        stored: list[str] = []
        ended: list[str] = []

        def stay(item: str) -> None:
            try:
                gates.wait(item)
                trio.from_thread.check_cancelled()
                stored.append(item)
            finally:
                ended.append(item)

        part = Dispatching("imports", ListSource(["stuck", "next"]), PIN[pin](stay))
        runtime = quick([part], shutdown_timeout=4, executor=KeyedExecutor(workers=1))
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await gates.arrival(*(["stuck"] if pin == "direct" else ["stuck", "next"]))
            assert part.context is not None
            lease = part.context.try_acquire("import of %s", "a.csv")
            runtime.request_stop()
            await wait_all_tasks_blocked()
            assert not caplog.records
            mock_clock.jump(2)
            await wait_all_tasks_blocked()
            (half,) = caplog.records
            assert "mailbox stuck" in half.getMessage()
            assert half.getMessage().endswith("open operations: import of a.csv (2.0 s)")
            mock_clock.jump(2)
            await runtime.wait_stopped()
            assert gates.inside  # the thread is still there
        (error,) = caught
        assert isinstance(error, ShutdownDeadlineError)
        assert "mailbox stuck" in error.held["imports"]
        assert error.operations == (("import of a.csv", 4.0),)
        abandoned = [record.getMessage() for record in caplog.records if "abandoned the thread" in record.getMessage()]
        assert any("stay for key stuck" in line for line in abandoned)
        assert lease is not None
        caplog.clear()
        gates.open_all()
        await until(lambda: len(ended) == len(gates.arrived))
        await wait_all_tasks_blocked()
        assert stored == []  # the handler heard of it, and its end is no error
        assert not caplog.records

    async def test_fs10_a_thread_that_is_not_to_be_abandoned_is_named_and_a_host_need_not_wait(
        self, gates: Gates, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A handler that awaits `trio.to_thread.run_sync` itself: Trio waits for that thread, whoever cancels."""
        caplog.set_level(logging.ERROR, "trio_wow.runtime")

        async def handler(item: str) -> None:
            await trio.to_thread.run_sync(gates.wait, item)

        runtime = quick([Dispatching("imports", ListSource(["stuck"]), handler)], shutdown_timeout=4)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await gates.arrival("stuck")
            runtime.request_stop()
            await wait_all_tasks_blocked()
            mock_clock.jump(4)
            await runtime.wait_forced()
            assert "imports held receiver, mailbox stuck" in caplog.text
            await wait_all_tasks_blocked()
            assert "mailbox stuck" in runtime.statistics().components[0].tasks
            assert not caught
            gates.open("stuck")
        assert isinstance(caught[0], ShutdownDeadlineError)

    @pytest.mark.parametrize("pin", ["direct", "blocking"])
    async def test_fs10_a_thread_that_returns_in_time_is_waited_for(
        self, pin: Pin, gates: Gates, mock_clock: MockClock
    ) -> None:
        handled: list[str] = []

        def stay(item: str) -> None:
            gates.wait(item)
            handled.append(item)

        async def stop(part: Part) -> None:
            await until(lambda: part.context is not None and not part.context.nursery.child_tasks)

        part = Dispatching("imports", ListSource(["slow", "next"]), PIN[pin](stay))
        part.steps["stop"] = stop
        runtime = quick([part], shutdown_timeout=4, executor=KeyedExecutor(workers=1))
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await gates.arrival("slow")
            runtime.request_stop()
            await wait_all_tasks_blocked()
            assert runtime.state.name == "STOPPING"
            gates.open_all()
        assert caught == [None]
        assert sorted(handled) == ["next", "slow"]

    @pytest.mark.parametrize("pin", ["direct", "blocking"])
    def test_fs10_a_process_ends_though_a_thread_does_not(self, pin: Pin) -> None:
        program = textwrap.dedent(f"""
            import threading, trio
            from trio_wow import KeyedExecutor
            from trio_wow.execution import {pin}
            from trio_wow.runtime import Runtime

            @{pin}
            def hang(item):
                trio.from_thread.run_sync(runtime.request_stop)
                threading.Event().wait()

            class Hanging:
                name = "hanging"
                async def prepare(self, context): self.context = context
                def start(self): self.context.nursery.start_soon(self.run)
                async def run(self):
                    send, receive = trio.open_memory_channel(1)
                    send.send_nowait("stuck")
                    await self.context.executor.dispatch(receive, key=str, handler=hang)
                def quiesce(self): pass
                async def stop(self): pass
                def force_stop(self): pass

            runtime = Runtime([Hanging()], shutdown_timeout=0.2)
            trio.run(runtime.serve)
        """)
        with PythonProcess("-c", program) as process:
            code, output, errors = process.finish()
        assert (code, output) == (1, "")
        assert "abandoned the thread of handler hang for key stuck" in errors
        assert "ShutdownDeadlineError: the stop was forced by its deadline (0.2 s): hanging held" in errors
        assert "mailbox stuck" in errors


class TestStart:
    async def test_fs12_a_port_that_was_bound_before_the_start_failed_is_free_again(self) -> None:
        log: list[str] = []
        bound: list[socket.socket] = []

        def bind(_: Part) -> None:
            server = socket.socket()
            bound.append(server)
            server.bind(("127.0.0.1", 0))
            raise OSError("no route")

        def close(_: Part) -> None:
            bound[0].close()

        parts = [Part("a", log), Part("b", log), Part("c", log, start=bind, stop=close), Part("d", log)]
        error = await collect(quick(parts).serve)
        assert isinstance(error, OSError)
        assert str(error) == "no route"
        assert log[-4:] == ["stop d", "stop c", "stop b", "stop a"]
        assert [line for line in log if line.startswith("start")] == ["start a", "start b", "start c"]
        assert [log.count(f"{step} {name}") for name in "abcd" for step in ("quiesce", "stop")] == [1] * 8
        assert bound[0].fileno() == -1

    async def test_fs12_a_start_that_hangs_is_given_up_at_the_deadline_of_its_stop(
        self, autojump_clock: MockClock
    ) -> None:
        log: list[str] = []
        runtime = quick([Part("a", log, stop=sleeping), Part("b", log, prepare=sleeping)], shutdown_timeout=3)
        caught: list[BaseException | None] = []
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await trio.sleep(100)
            assert runtime.state.name == "STARTING"  # a start has no deadline of its own
            runtime.request_stop()
        assert trio.current_time() - start == 103
        assert isinstance(caught[0], ShutdownDeadlineError)
        assert log[-2:] == ["force_stop b", "force_stop a"]


def stepped(id: str) -> DomainEventStream:
    return DomainEventStream(
        aggregate_id=AggregateId("chains", "chain", id),
        version=1,
        events=[Stepped(0)],
        command_id=f"command {id}",
        request_id=f"request {id}",
    )


class Boom(BaseException):
    pass


def _group_of_boom() -> BaseException:
    return BaseExceptionGroup("group", [Boom(), BaseExceptionGroup("inner", [ValueError("kept")])])


@event_processor
class Raising:
    """Raises an error for the first step of chain `a`; others wait for ever."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @on_event
    async def stepped(self, event: Stepped) -> None:
        await trio.lowlevel.checkpoint()
        if event.number == 0:
            raise self.error
        await trio.sleep_forever()


@event_processor
class Staying:
    """Does not end until it is cancelled."""

    @on_event
    async def stepped(self, event: Stepped) -> None:
        await trio.sleep_forever()


class TestFailure:
    @pytest.mark.parametrize("make", [Boom, partial(SystemExit, 3), KeyboardInterrupt, _group_of_boom])
    @pytest.mark.parametrize("others", ["none", "its own wait", "another's wait"])
    async def test_fs03_what_is_no_exception_ends_the_runtime_in_time_and_its_message_is_not_acknowledged(
        self, make: Callable[[], BaseException], others: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = make()
        acknowledged: list[object] = []

        async def acknowledge(exchange: MessageExchange[Any]) -> None:
            acknowledged.append(exchange.message)

        monkeypatch.setattr(MessageExchange, "acknowledge", acknowledge)
        domain, commands, events = Domain([Chain]), InMemoryCommandBus(), InMemoryDomainEventBus()
        gateway = CommandGateway(domain, commands)
        store = InMemoryEventStore(domain.serializer)
        components: list[Any] = [CommandDispatcher(domain, commands, store, events, results=gateway.results)]
        if others == "another's wait":
            components.append(EventDispatcher(registry_of(domain, Staying()), events, name="staying"))
        components += [EventDispatcher(registry_of(domain, Raising(error)), events), gateway]
        runtime = quick(components, shutdown_timeout=5)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            start = trio.current_time()
            if others == "its own wait":
                await gateway.send(Step("b", 1))
                await wait_all_tasks_blocked()
            await gateway.send(Step("a", 0))
            await runtime.wait_stopped()
            assert trio.current_time() - start == (5 if others == "another's wait" else 0)
        (raised,) = caught
        assert raised is not None
        forced = None
        if others == "another's wait":
            assert isinstance(raised, BaseExceptionGroup)
            raised, forced = raised.exceptions
            assert isinstance(forced, ShutdownDeadlineError)
            assert "mailbox chains.chain/a" in forced.held["staying"]
        if isinstance(error, SystemExit):
            assert isinstance(raised, HandlerExitError)
            assert raised.__cause__ is error
        else:
            assert raised is error
        assert [type(message).__name__ for message in acknowledged] == ["CommandMessage"] * len(acknowledged)
        assert len(acknowledged) == (2 if others == "its own wait" else 1)

    @pytest.mark.parametrize("pin", ["direct", "blocking"])
    @pytest.mark.parametrize("make", [Boom, partial(SystemExit, 3), partial(ValueError, "x"), _group_of_boom])
    async def test_fs03_an_error_from_a_thread_reaches_the_caller_of_serve(
        self, pin: Pin, make: Callable[[], BaseException], mock_clock: MockClock
    ) -> None:
        error = make()

        def fail(_: object) -> None:
            raise error

        log: list[str] = []
        runtime = quick([Part("a", log), Dispatching("b", ListSource([1]), PIN[pin](fail), log)])
        raised = await collect(runtime.serve)
        cause = raised.__cause__ if isinstance(raised, HandlerExitError) else raised
        if isinstance(error, BaseExceptionGroup):
            assert repr(cause) == repr(error)  # Trio makes another group of it on the way
        else:
            assert cause is error
        assert log[-2:] == ["stop b", "stop a"]


class Hot:
    """Items of one key, without end, until it is told to stop."""

    def __init__(self) -> None:
        self.given = 0
        self.stop_requested: trio.Event | None = None

    async def receive_batch(self, limit: int, /) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        if self.stop_requested is not None and self.stop_requested.is_set():
            raise trio.EndOfChannel
        self.given += limit
        return ["hot"] * limit


class TestMemory:
    async def test_fs05_memory_follows_what_is_tried_again_and_not_how_often(self, autojump_clock: MockClock) -> None:
        ids, retries = 200, 20
        calls = 0
        kept: list[int] = []

        @event_processor
        class Trying:
            @on_event
            async def stepped(self, event: Stepped) -> None:
                nonlocal calls
                calls += 1
                if calls % (ids * retries // 10) == 0:
                    (dispatch,) = executor.statistics().dispatches
                    assert len(runtime.statistics().leases) == dispatch.in_flight == dispatch.mailboxes <= ids
                    gc.collect()
                    kept.append(len(gc.get_objects()))
                raise OSError("unreachable")

        domain, events, executor = Domain([Chain]), InMemoryDomainEventBus(), KeyedExecutor()
        retry = FilterChain([Retry(retries=retries, backoff=1, max_backoff=5, jitter=2)])
        dispatcher = EventDispatcher(registry_of(domain, Trying()), events, function_filters=retry)
        runtime = quick([dispatcher], executor=executor, shutdown_timeout=10**6)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            for n in range(ids):
                await events.send(stepped(str(n)))
            runtime.request_stop()
        assert calls == ids * (retries + 1)
        assert kept[-1] - kept[1] < ids
        assert runtime.statistics().leases == ()


class TestTraffic:
    async def test_fs04_a_stop_with_a_hot_key_begins_at_once(self, mock_clock: MockClock) -> None:
        source = Hot()
        handled = 0
        marks: dict[str, int] = {}

        async def handler(_: str) -> None:  # never waits
            nonlocal handled
            handled += 1

        class Component(Dispatching):
            async def prepare(self, context: RuntimeContext, /) -> None:
                await super().prepare(context)
                source.stop_requested = context.stop_requested

            def quiesce(self) -> None:
                marks["quiesce"] = handled

        runtime = quick([Component("hot", source, handler)], executor=KeyedExecutor(workers=1, throughput=16))
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            while handled < 1000:
                await trio.lowlevel.checkpoint()
            runtime.request_stop()
            marks["stop"] = handled
        # A few passes of the event loop, and in each of them no more of the key than its turn.
        assert marks["quiesce"] - marks["stop"] <= 16 * 8
        assert handled == source.given  # what was taken was finished

    async def test_fs04_a_stop_refuses_what_waits_for_a_hot_aggregate_and_finishes_what_it_has(
        self, mock_clock: MockClock
    ) -> None:
        window = 16
        domain, commands, events = Domain([Chain]), InMemoryCommandBus(), InMemoryDomainEventBus()
        gateway = CommandGateway(domain, commands)
        store = InMemoryEventStore(domain.serializer)
        dispatcher = CommandDispatcher(domain, commands, store, events, results=gateway.results)
        runtime = quick([dispatcher, gateway], executor=KeyedExecutor(workers=1, max_in_flight=window))
        accepted: list[int] = []
        refused: list[int] = []

        async def send(number: int) -> None:
            try:
                await gateway.send(Step("hot", number))
                accepted.append(number)
            except AdmissionClosedError:
                refused.append(number)

        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            for number in range(1000):
                nursery.start_soon(send, number)
            while len(accepted) < 100:
                await trio.lowlevel.checkpoint()
            before = len(accepted)
            runtime.request_stop()
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            assert len(accepted) <= before + window
            assert len(refused) == 1000 - len(accepted)
        numbers = [
            e.number for stream in await store.load(AggregateId("chains", "chain", "hot")) for e in stream.events
        ]
        assert sorted(numbers) == sorted(accepted)

    async def test_fs13_a_drain_takes_nothing_more_from_constant_traffic_and_is_not_stretched_by_it(
        self, autojump_clock: MockClock
    ) -> None:
        domain, commands, events = Domain([Chain]), InMemoryCommandBus(), InMemoryDomainEventBus()
        gateway = CommandGateway(domain, commands)
        store, steps = InMemoryEventStore(domain.serializer), Steps()
        transport, records = trio.open_memory_channel[int](10**6)
        taken: list[int] = []
        committed: list[int] = []

        class Intake(Part):
            """Takes records from a transport, 20 at a time, and answers each with a command."""

            def start(self) -> None:
                self.spawn(self._take)

            async def _take(self) -> None:
                assert self.context is not None
                async with trio.open_nursery() as nursery:
                    running = trio.CapacityLimiter(20)
                    while not self.context.stop_requested.is_set():
                        await running.acquire_on_behalf_of(borrower := object())
                        if self.context.stop_requested.is_set():
                            break
                        record = await records.receive()
                        taken.append(record)
                        nursery.start_soon(self._handle, record, running, borrower)

            async def _handle(self, record: int, running: trio.CapacityLimiter, borrower: object) -> None:
                assert self.context is not None
                lease = self.context.try_acquire("record %s", record)
                assert lease is not None
                with lease:
                    await trio.sleep(0.1)
                    await gateway.send(Step(str(record)))
                    committed.append(record)
                running.release_on_behalf_of(borrower)

        runtime = quick(
            [
                CommandDispatcher(domain, commands, store, events, results=gateway.results),
                ProjectionDispatcher(registry_of(domain, steps), events),
                Intake("intake", []),
                gateway,
            ],
            shutdown_timeout=2,
            shutdown_quiet_period=0.2,
        )
        outcomes: dict[str, bool] = {}

        async def produce() -> None:
            """Without an end, to the transport and to the gateway."""
            for number in range(10**6):
                transport.send_nowait(number)
                try:
                    await gateway.send(Step(f"from outside {number}"))
                    outcomes[f"from outside {number}"] = True
                except AdmissionClosedError:
                    outcomes[f"from outside {number}"] = False
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            async with trio.open_nursery() as traffic:
                traffic.start_soon(produce)
                await trio.sleep(0.55)
                runtime.request_stop()
                taken_by_then = list(taken)
                assert len(taken_by_then) - len(committed) == 20
                start = trio.current_time()
                await runtime.wait_stopped()
                assert 0.2 <= trio.current_time() - start < 0.6
                traffic.cancel_scope.cancel()
        assert taken == taken_by_then
        assert sorted(committed) == taken
        accepted = {id for id, ok in outcomes.items() if ok}
        assert len(accepted) < len(outcomes)
        assert set(steps.of) == accepted | {str(record) for record in committed}
