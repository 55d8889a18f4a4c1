"""Local-first buses: receipts, routes, the shared window, and copies that are handled already."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from distributed_support import Network, NetworkReceiver
from test_buses import command, numbers, stream
from trio.testing import wait_all_tasks_blocked

import trio_wow.buses._local_first as local_first
from trio_wow.buses import (
    InMemoryCommandBus,
    InMemoryDomainEventBus,
    InMemoryStateEventBus,
    LocalFirstCommandBus,
    LocalFirstDomainEventBus,
    LocalFirstStateEventBus,
    Subscription,
)
from trio_wow.errors import RuntimeStateError
from trio_wow.messages import CommandMessage, StateEvent
from trio_wow.runtime import Admission

THINGS = frozenset({"thing"})


class Node:
    """A local-first bus with receivers of one runtime, whose intake is open."""

    def __init__(
        self, nursery: trio.Nursery, network: Network | None = None, kind: Any = None, name: str = "A"
    ) -> None:
        self.nursery = nursery
        self.network = network if network is not None else Network()
        self.admission = Admission()
        self.admission.open_intake()
        kind, local = kind or (LocalFirstCommandBus, InMemoryCommandBus)
        self.bus: Any = kind(local(), self.network.bus(name))

    def receiver(self, group: str = "group", *, demand: int = 0, is_open: bool = True) -> Any:
        subscription = Subscription(group, "context", THINGS, self.admission, nursery=self.nursery)
        receiver = self.bus.receiver(subscription)
        if is_open:
            receiver.open()
        if demand:
            receiver.add_demand(demand)
        return receiver

    def twin(self, group: str = "group") -> NetworkReceiver:
        (receiver,) = self.network.group(group, "context").receivers
        return receiver


EVENTS = (LocalFirstDomainEventBus, InMemoryDomainEventBus)
STATES = (LocalFirstStateEventBus, InMemoryStateEventBus)


@asynccontextmanager
async def a_node(network: Network | None = None, kind: Any = None) -> AsyncIterator[Node]:
    async with trio.open_nursery() as nursery:
        yield Node(nursery, network, kind)
        nursery.cancel_scope.cancel()


async def drain(receiver: Any) -> list[Any]:
    """Return what a receiver holds, when nothing moves any more."""
    await wait_all_tasks_blocked()
    batch: list[Any] = []
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def take() -> None:
                batch.extend(await receiver.receive_batch(99))
                scope.cancel()

            nursery.start_soon(take)
            await wait_all_tasks_blocked()
            scope.cancel()
    return batch


def marks(message: Any) -> dict[str, str]:
    return {name: value for name, value in message.headers.items() if name.startswith("wow-local")}


class TestReceipts:
    async def test_true_when_the_open_receiver_was_admitted(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=9)
            assert await node.bus.send_with_receipt(command(1))
            assert [lease.name for lease in node.admission.leases] == ["Do for context.thing/1, in group"]
            (sent,) = node.network.sent
            assert marks(sent) == {
                "wow-local-first": "true",
                "wow-local-receivers": f'{{"group":"{receiver.id}"}}',
            }

    @pytest.mark.parametrize("why", ["nobody", "not open", "closed", "other aggregate", "intake closed", "void"])
    async def test_false_at_once_when_nobody_can_take_it_here(self, why: str) -> None:
        async with a_node() as node:
            receiver = None if why == "nobody" else node.receiver(demand=9, is_open=why != "not open")
            if receiver is not None and why == "closed":
                receiver.close()
            if why == "intake closed":
                node.admission.close_intake()
            message = command(1, aggregate="other" if why == "other aggregate" else "thing")
            if why == "void":
                message = CommandMessage(aggregate_id=message.aggregate_id, body=message.body, is_void=True)
            assert not await node.bus.send_with_receipt(message)
            (sent,) = node.network.sent
            assert sent.is_void is (why == "void")
            assert marks(sent) == {"wow-local-first": "false"}
            assert not node.admission.leases

    @pytest.mark.parametrize("how", ["close", "abandon", "intake", "admission"])
    async def test_false_when_the_receiver_goes_while_the_sender_waits_for_it(self, how: str) -> None:
        async with a_node() as node:
            receiver = node.receiver()
            receipts: list[bool] = []

            async def send() -> None:
                receipts.append(await node.bus.send_with_receipt(command(1)))

            node.nursery.start_soon(send)
            await wait_all_tasks_blocked()
            assert receipts == []
            assert node.network.sent == []
            {
                "close": receiver.close,
                "abandon": receiver.abandon,
                "intake": node.admission.close_intake,
                "admission": node.admission.close,
            }[how]()
            await wait_all_tasks_blocked()
            assert receipts == [False]
            assert [marks(sent) for sent in node.network.sent] == [{"wow-local-first": "false"}]
            assert not node.admission.leases

    async def test_when_one_of_two_goes_nobody_gets_it_here(self) -> None:
        async with a_node(kind=EVENTS) as node:
            stays, goes = node.receiver("stays", demand=9), node.receiver("goes")
            receipts: list[bool] = []

            async def send() -> None:
                receipts.append(await node.bus.send_with_receipt(stream()))

            node.nursery.start_soon(send)
            await wait_all_tasks_blocked()
            goes.close()
            await wait_all_tasks_blocked()
            assert receipts == [False]
            assert not node.admission.leases
            ((brought,),) = [await drain(stays)]
            assert brought.lease is None  # by the distributed route

    async def test_only_the_groups_that_are_open_count(self) -> None:
        async with a_node(kind=EVENTS) as node:
            opened, closed = node.receiver("open", demand=9), node.receiver("not open", demand=9, is_open=False)
            assert await node.bus.send_with_receipt(stream())
            lease = node.admission.try_acquire()
            assert lease is not None
            with lease:
                assert await node.bus.send_with_receipt(stream())
            for sent in node.network.sent:
                assert marks(sent)["wow-local-receivers"] == f'{{"open":"{opened.id}"}}'
            assert await drain(closed) == []

    async def test_true_when_all_groups_were_admitted_and_a_later_shutdown_does_not_revoke_it(self) -> None:
        async with a_node(kind=EVENTS) as node:
            receivers = [node.receiver(name, demand=1) for name in ("a", "b")]
            assert await node.bus.send_with_receipt(stream())
            node.admission.close()
            assert len(node.admission.leases) == 2
            for receiver in receivers:
                receiver.close()
                (exchange,) = await receiver.receive_batch(9)
                assert exchange.lease.is_open
                with pytest.raises(trio.EndOfChannel):
                    await receiver.receive_batch(9)

    async def test_from_inside_it_does_not_wait_and_is_false_once_admission_has_closed(self) -> None:
        async with a_node() as node:
            receiver = node.receiver()
            lease = node.admission.try_acquire()
            assert lease is not None
            with lease:
                node.admission.close_intake()
                assert await node.bus.send_with_receipt(command(1))
                assert node.admission.is_overdrawn
                node.admission.close()
                assert not await node.bus.send_with_receipt(command(2))
            assert numbers(await receiver.receive_batch(9)) == [1]
            assert [marks(sent)["wow-local-first"] for sent in node.network.sent] == ["true", "false"]

    async def test_send_if_subscribed_counts_both_routes(self) -> None:
        async with a_node() as node:
            assert not await node.bus.send_if_subscribed(command(1))
            receiver = node.receiver(demand=9)
            assert await node.bus.send_if_subscribed(command(1))
            receiver.close()
            assert await node.bus.send_if_subscribed(command(1))  # the group is still there
            node.network.groups.clear()
            assert not await node.bus.send_if_subscribed(command(1))

    async def test_a_receiver_needs_a_nursery_and_both_buses(self) -> None:
        async with a_node() as node:
            with pytest.raises(RuntimeStateError, match="LocalFirstCommandBus runs a task for each receiver"):
                node.bus.receiver(Subscription("group", "context", THINGS, node.admission))

            def fail(_subscription: Subscription) -> Any:
                raise OSError("no broker")

            network_bus = node.bus._distributed
            network_bus.receiver = fail
            with pytest.raises(OSError, match="no broker"):
                node.receiver()
            assert not await node.bus.send_with_receipt(command(1))  # the local half is closed again


class TestRoutes:
    @pytest.mark.parametrize("kind", [None, EVENTS, STATES], ids=["commands", "events", "states"])
    async def test_headers_of_one_route_never_come_into_another(self, kind: Any) -> None:
        async with a_node(kind=kind) as node:
            receiver = node.receiver(demand=9)
            message: Any = stream(headers={"h": "1"})
            if kind is STATES:
                message = StateEvent(message, {"a": 1})
            elif kind is None:
                message = CommandMessage(aggregate_id=message.aggregate_id, body=None, headers={"h": "1"})
            await node.bus.send(message)
            assert message.headers == {"h": "1"}
            local, distributed = await drain(receiver)
            assert (local.lease is None, distributed.lease is None) == (False, True)
            assert local.message == distributed.message == message
            local.message.headers["h"] = "2"
            assert distributed.message.headers == message.headers == {"h": "1"}
            assert node.network.sent[0].headers.keys() == {"h", "wow-local-first", "wow-local-receivers"}

    async def test_marks_of_a_former_route_are_taken_off(self) -> None:
        async with a_node(kind=EVENTS) as node:
            forged = stream(headers={"wow-local-first": "true", "wow-local-receivers": '{"group":"x"}', "h": "1"})
            assert not await node.bus.send_with_receipt(forged)
            assert node.network.sent[0].headers == {"wow-local-first": "false", "h": "1"}

    @pytest.mark.parametrize("written", ["", "no JSON", "[1]", "{}", '{"group":7}'])
    async def test_marks_that_name_no_receiver_are_as_good_as_none(self, written: str) -> None:
        async with a_node(kind=EVENTS) as node:
            receiver = node.receiver(demand=9)
            message = stream(headers={"wow-local-first": "true", "wow-local-receivers": written})
            await node.network.bus("B").send(message)
            got = await drain(receiver)
            if written == '{"group":7}':  # some other receiver, for all that is known
                assert (got, node.network.is_done) == ([], True)
            else:
                assert [(each.message.headers, each.is_settled()) for each in got] == [({}, False)]

    async def test_what_is_sent_by_the_local_bus_alone_has_no_copy_that_could_replace_it(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=9)
            await node.bus._local.send(command(1))
            (exchange,) = await drain(receiver)
            exchange.discard()
            assert not receiver.runs.unfinished
            assert not node.admission.leases

    async def test_a_group_elsewhere_is_not_named_in_the_mark_and_handles_it(self) -> None:
        async with a_node(kind=EVENTS) as node:
            here = node.receiver("here", demand=9)
            other = Node(node.nursery, node.network, EVENTS, "B")
            there = other.receiver("there", demand=9)
            await node.bus.send(stream())
            local, copy = await drain(here)
            await local.acknowledge()
            (independent,) = await drain(there)
            assert (copy.is_settled(), independent.is_settled()) == (True, False)


class TestCopies:
    async def test_its_own_is_settled_when_the_local_run_has_finished(self) -> None:
        async with a_node(Network(copies=2)) as node:
            receiver = node.receiver(demand=64)
            await node.bus.send(command(1))
            local, first, second = await drain(receiver)
            assert not any(each.taken_elsewhere for each in (local, first, second))
            assert not first.is_settled()
            await local.acknowledge()
            assert first.is_settled()
            await first.acknowledge()
            assert not node.network.is_done
            node.network.redeliver()  # needs no room any more
            assert await drain(receiver) == []
            assert node.network.is_done

    async def test_its_own_is_handled_when_the_local_run_was_let_go(self) -> None:
        async with a_node(Network(copies=2)) as node:
            receiver = node.receiver(demand=64)
            await node.bus.send(command(1))
            local, first, second = await drain(receiver)
            local.discard()
            local.discard()
            assert not first.is_settled()
            assert not second.is_settled()
            assert not node.admission.leases
            await first.acknowledge()
            assert second.is_settled()
            await second.acknowledge()
            assert node.network.is_done
            assert not receiver.runs.unfinished

    @pytest.mark.parametrize("finished", [True, False])
    async def test_its_own_that_finds_no_room_waits_for_that_or_for_the_end_of_the_local_run(
        self, finished: bool
    ) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=1)
            await node.bus.send(command(1))
            (local,) = await drain(receiver)
            group = node.network.group("group", "context")
            assert len(group.unacknowledged) == 1
            if finished:
                await local.acknowledge()
            else:
                local.discard()
            assert await drain(receiver) == []
            assert node.network.is_done is finished
            receiver.add_demand(1)
            assert numbers(await drain(receiver)) == ([] if finished else [1])
            assert receiver._local._room == (1 if finished else 0)

    async def test_a_local_run_may_end_before_its_sender_goes_on(self) -> None:
        async with a_node(Network(delay=100.0)) as node:
            receiver = node.receiver()
            node.nursery.start_soon(node.bus.send, command(1))
            await wait_all_tasks_blocked()
            receiver.add_demand(2)  # hands it over; the sender is yet to run
            (raw,) = receiver._local._queue
            receiver._local._queue.clear()
            await receiver._local_copy(raw).acknowledge()
            assert node.network.sent == []
            await wait_all_tasks_blocked()
            node.network.let_go()
            assert await drain(receiver) == []
            assert node.network.is_done
            assert not receiver.runs._under_way

    @pytest.mark.parametrize("kind", [None, EVENTS], ids=["commands", "events"])
    async def test_what_another_node_took_is_left_by_events_and_looked_up_by_commands(self, kind: Any) -> None:
        async with a_node(Network(node_of=lambda _: "B"), kind) as node:
            node.receiver(demand=9)
            other = Node(node.nursery, node.network, kind, "B")
            receiver = other.receiver(demand=9)
            await node.bus.send(command(1) if kind is None else stream())
            node.network.forgetting = 1
            got = await drain(receiver)
            assert [copy.taken_elsewhere for copy in got] == ([True] if kind is None else [])
            for copy in got:
                assert not copy.is_settled()
                copy.discard()
            node.network.redeliver()
            (copy,) = await drain(receiver)
            assert copy.redelivered
            assert not copy.taken_elsewhere
            assert not copy.is_settled()  # who took it has perhaps died

    async def test_what_nobody_took_is_handled_by_whoever_gets_it(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=9)
            assert not await node.bus.send_with_receipt(command(2, aggregate="other"))
            (copy,) = await drain(receiver)
            assert not copy.is_settled()
            assert not copy.taken_elsewhere


class TestWhenTheNetworkFails:
    async def test_who_took_it_here_does_not_get_it_again(self) -> None:
        async with a_node(kind=EVENTS) as node:
            receiver = node.receiver(demand=9)
            node.network.failing = 2
            message = stream()
            for _ in range(2):
                with pytest.raises(OSError, match="the network is down") as caught:
                    await node.bus.send(message)
                assert caught.value.__notes__ == ["group took the message locally, before it could not be sent on"]
            assert await node.bus.send_with_receipt(message)
            local, copy = await drain(receiver)
            assert (local.lease is None, copy.lease is None) == (False, True)
            await local.acknowledge()
            assert copy.is_settled()
            assert await node.bus.send_with_receipt(message)  # again, as after a redelivered command
            assert [each.lease is None for each in await drain(receiver)] == [False, True]

    async def test_unless_it_has_gone_meanwhile(self) -> None:
        async with a_node(kind=EVENTS) as node:
            receiver = node.receiver(demand=9)
            node.network.failing = 1
            message = stream()
            with pytest.raises(OSError, match="down"):
                await node.bus.send(message)
            receiver.abandon()
            assert not node.admission.leases
            successor = node.receiver(demand=9)
            assert await node.bus.send_with_receipt(message)
            local, copy = await drain(successor)
            assert (local.lease is None, copy.lease is None) == (False, True)

    async def test_what_nobody_took_is_simply_not_sent(self) -> None:
        async with a_node() as node:
            node.network.failing = 1
            with pytest.raises(OSError, match="down") as caught:
                await node.bus.send(command(1))
            assert not hasattr(caught.value, "__notes__")
            assert not node.bus._to_be_sent_on

    async def test_only_so_many_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_first, "REMEMBERED", 2)
        async with a_node() as node:
            receiver = node.receiver(demand=9)
            messages = [command(number) for number in range(3)]
            node.network.failing = 3
            for message in messages:
                with pytest.raises(OSError, match="down"):
                    await node.bus.send(message)
            assert numbers(await drain(receiver)) == [0, 1, 2]
            for message in messages:
                assert await node.bus.send_with_receipt(message)
            # The first was forgotten, so it comes once more; its request ID makes that harmless.
            assert [each.message.body.number for each in await drain(receiver) if each.lease is not None] == [0]


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope when a task is about to run for the nth time."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, step: int) -> None:
        self.task, self.scope, self.left = task, scope, step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if not self.left:
                self.scope.cancel()


class TestCancellation:
    @pytest.mark.parametrize("room", [0, 1])
    @pytest.mark.parametrize("step", range(1, 8))
    async def test_a_send_that_is_cancelled_anywhere_was_sent_nowhere_or_is_only_sent_on(
        self, step: int, room: int
    ) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=room)
            message = command(1)

            async def send(scope: trio.CancelScope) -> None:
                with scope:
                    instrument = CancelAtStep(trio.lowlevel.current_task(), scope, step)
                    trio.lowlevel.add_instrument(instrument)
                    try:
                        await node.bus.send(message)
                    finally:
                        trio.lowlevel.remove_instrument(instrument)

            scope = trio.CancelScope()
            node.nursery.start_soon(send, scope)
            await wait_all_tasks_blocked()
            receiver.add_demand(8)
            await wait_all_tasks_blocked()
            await drain_and_check_once(node, receiver, message)


async def drain_and_check_once(node: Node, receiver: Any, message: Any) -> None:
    """Send a message again, as its sender would, and see that the local receiver gets it once."""
    before = len(node.network.sent)
    await node.bus.send(message)
    got = await drain(receiver)
    local = [exchange for exchange in got if exchange.lease is not None]
    # If the first call had come through, a second one is another delivery.
    assert len(local) == len(node.network.sent) == before + 1
    for exchange in local:
        exchange.lease.close()
    assert not node.admission.leases


class TestTheSharedWindow:
    async def test_the_feed_asks_for_up_to_half_of_the_room_and_a_sixteenth_of_the_window(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=64)
            await wait_all_tasks_blocked()
            assert node.twin().limits == [4]
            lease = node.admission.try_acquire()
            assert lease is not None
            for number in range(60):
                await node.bus._local.send(command(number))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.bus._local.send, command(60))
                await wait_all_tasks_blocked()
                assert len(node.admission.leases) == 61  # the 60, and ours: 4 places are the feed's
                receiver.add_demand(1)
            lease.close()
            assert numbers(await drain(receiver)) == list(range(61))

    async def test_places_that_were_not_needed_come_back(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=64)
            await wait_all_tasks_blocked()
            await node.network.bus("B").send(command(0))
            await wait_all_tasks_blocked()
            assert node.twin().limits == [4, 4]
            assert receiver._local._room == 64 - 1 - 4

    async def test_in_a_window_of_one_both_routes_have_their_turn(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=1)
            for number in range(10, 13):
                await node.network.bus("B").send(command(number))

            async def send() -> None:
                for number in range(3):
                    await node.bus._local.send(command(number))

            node.nursery.start_soon(send)
            got = []
            for _ in range(6):
                await wait_all_tasks_blocked()
                (exchange,) = await receiver.receive_batch(1)
                got.append(exchange.message.body.number)
                receiver.add_demand(1)
            assert sorted(got) == [0, 1, 2, 10, 11, 12]
            assert [number for number in got if number < 10] == [0, 1, 2]
            assert [number for number in got if number >= 10] == [10, 11, 12]
            assert {number >= 10 for number in got[:2]} == {True, False}

    async def test_what_finds_no_room_waits_in_the_feed_and_goes_before_the_senders(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=1)
            await wait_all_tasks_blocked()
            await node.bus._local.send(command(0))
            await node.network.bus("B").send(command(10))
            await node.network.bus("B").send(command(11))
            await wait_all_tasks_blocked()
            assert len(node.network.group("group", "context").unacknowledged) == 1
            node.nursery.start_soon(node.bus._local.send, command(1))
            await wait_all_tasks_blocked()
            receiver.add_demand(1)
            assert numbers(await drain(receiver)) == [0, 10]
            receiver.add_demand(1)
            assert numbers(await drain(receiver)) == [1]

    async def test_while_anything_is_overdrawn_the_feed_takes_nothing(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=2)
            await wait_all_tasks_blocked()
            lease = node.admission.try_acquire()
            assert lease is not None
            with lease:
                for number in range(4):
                    await node.bus._local.send(command(number))
            assert node.admission.is_overdrawn
            for number in (10, 11):
                await node.network.bus("B").send(command(number))
            assert numbers(await drain(receiver)) == [0, 1, 2, 3]
            assert len(node.network.group("group", "context").pending) == 1  # one was asked for before
            receiver.add_demand(3)
            assert numbers(await drain(receiver)) == [10]
            receiver.add_demand(1)
            assert numbers(await drain(receiver)) == [11]

    async def test_at_a_stop_request_it_asks_no_more_and_lets_go_of_what_found_no_room(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=1)
            await wait_all_tasks_blocked()
            await node.bus._local.send(command(0))
            await node.network.bus("B").send(command(10))
            await wait_all_tasks_blocked()
            node.admission.close_intake()
            await node.network.bus("B").send(command(11))
            receiver.add_demand(5)
            assert numbers(await drain(receiver)) == [0]
            assert node.twin().limits == [1]
            assert len(node.network.group("group", "context").unacknowledged) == 1

    async def test_at_a_stop_request_an_ask_that_waits_is_taken_back(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=9)
            await wait_all_tasks_blocked()
            node.admission.close_intake()
            await node.network.bus("B").send(command(10))
            assert await drain(receiver) == []
            assert len(node.network.group("group", "context").pending) == 1
            assert receiver._local._room == 9

    async def test_before_the_runtime_takes_anything_the_feed_does_not_ask(self) -> None:
        async with a_node() as node:
            node.admission.close_intake()
            node.receiver(demand=9)
            await wait_all_tasks_blocked()
            assert node.twin().limits == []
            node.admission.open_intake()
            await wait_all_tasks_blocked()
            assert node.twin().limits == [1]

    async def test_what_the_distributed_receiver_raises_comes_out_of_the_receiver(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=9)
            await node.bus._local.send(command(1))
            node.twin().broken = OSError("connection lost")
            await node.network.bus("B").send(command(2))
            await wait_all_tasks_blocked()
            assert not await node.bus.send_with_receipt(command(3))  # nothing goes to the dead
            assert numbers(await receiver.receive_batch(9)) == [1]
            with pytest.raises(OSError, match="connection lost"):
                await receiver.receive_batch(9)
            receiver.abandon()

    async def test_when_the_distributed_receiver_ends_the_receiver_does(self) -> None:
        async with a_node() as node:
            receiver = node.receiver(demand=9)
            await wait_all_tasks_blocked()
            node.twin().close()
            await wait_all_tasks_blocked()
            with pytest.raises(trio.EndOfChannel):
                await receiver.receive_batch(9)

    async def test_closing_ends_the_feed_and_what_it_holds_stays_unacknowledged(self) -> None:
        async with trio.open_nursery() as nursery:
            node = Node(nursery)
            receiver = node.receiver(demand=1)
            await wait_all_tasks_blocked()
            await node.bus._local.send(command(0))
            await node.network.bus("B").send(command(10))
            await wait_all_tasks_blocked()
            receiver.close()
            receiver.close()
            assert numbers(await receiver.receive_batch(9)) == [0]
            with pytest.raises(trio.EndOfChannel):
                await receiver.receive_batch(9)
        group = node.network.group("group", "context")
        assert len(group.unacknowledged) == len(group.discarded) == 1
