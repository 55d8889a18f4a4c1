"""In-memory buses: demand, order, groups, and what comes from inside."""

from functools import partial
from typing import Any

import pytest
import trio
from attrs import frozen
from support import collect
from trio.testing import wait_all_tasks_blocked

from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus, MessageExchange, Subscription
from trio_wow.errors import AdmissionClosedError, RuntimeStateError, SerializationError
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream
from trio_wow.runtime import Admission


@frozen
class Do:
    id: str
    number: int = 0


def command(number: int, id: str = "1", aggregate: str = "thing") -> CommandMessage:
    return CommandMessage(aggregate_id=AggregateId("context", aggregate, id), body=Do(id, number))


def stream(id: str = "1", **options: Any) -> DomainEventStream:
    aggregate_id = AggregateId("context", "thing", id)
    return DomainEventStream(
        aggregate_id=aggregate_id, version=1, events=(Do(id),), command_id="c", request_id="r", **options
    )


def numbers(batch: Any) -> list[int]:
    return [exchange.message.body.number for exchange in batch]


class Node:
    """A bus with receivers of one runtime, whose intake is open."""

    def __init__(self, bus: Any = None) -> None:
        self.bus: Any = bus if bus is not None else InMemoryCommandBus()
        self.admission = Admission()
        self.admission.open_intake()

    def receiver(self, group: str = "group", aggregates: frozenset[str] = frozenset({"thing"}), demand: int = 0) -> Any:
        receiver = self.bus.receiver(Subscription(group, "context", aggregates, self.admission))
        receiver.open()
        if demand:
            receiver.add_demand(demand)
        return receiver


class TestFromOutside:
    async def test_a_send_waits_for_demand_and_that_wait_is_the_only_buffer(self) -> None:
        node = Node()
        receiver = node.receiver(demand=2)
        sent: list[int] = []

        async def sender() -> None:
            for number in range(5):
                await node.bus.send(command(number))
                sent.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender)
            await wait_all_tasks_blocked()
            assert sent == [0, 1]
            assert numbers(await receiver.receive_batch(9)) == [0, 1]
            await wait_all_tasks_blocked()
            assert sent == [0, 1]
            receiver.add_demand(1)
            await wait_all_tasks_blocked()
            assert sent == [0, 1, 2]
            receiver.add_demand(5)
        assert numbers(await receiver.receive_batch(9)) == [2, 3, 4]

    async def test_waiting_sends_are_served_in_their_order_and_not_overtaken(self) -> None:
        node = Node()
        receiver = node.receiver()
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(node.bus.send, command(number, id=str(number)))
                await wait_all_tasks_blocked()
            receiver.add_demand(3)
            nursery.start_soon(node.bus.send, command(6))
            await wait_all_tasks_blocked()
            receiver.add_demand(4)
        assert numbers(await receiver.receive_batch(9)) == list(range(7))

    async def test_a_cancelled_send_has_sent_nothing_and_holds_up_nobody(self) -> None:
        node = Node()
        thing, other = node.receiver(), node.receiver("other", frozenset({"other"}), demand=5)
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(node.bus.send, command(1))
                    await wait_all_tasks_blocked()
                    nursery.start_soon(node.bus.send, command(2, aggregate="other"))
                    await wait_all_tasks_blocked()
                    scope.cancel()
        assert numbers(await other.receive_batch(9)) == [2]
        thing.add_demand(1)
        thing.close()
        with pytest.raises(trio.EndOfChannel):
            await thing.receive_batch(9)

    async def test_a_cancelled_send_with_room_has_sent_nothing(self) -> None:
        node = Node()
        receiver = node.receiver(demand=1)
        with trio.move_on_after(0) as scope:
            await node.bus.send(command(1))
        assert scope.cancelled_caught
        receiver.close()
        with pytest.raises(trio.EndOfChannel):
            await receiver.receive_batch(9)
        assert not node.admission.leases

    async def test_a_receiver_that_is_not_open_yet_lets_senders_wait(self) -> None:
        node = Node()
        receiver = node.bus.receiver(Subscription("group", "context", frozenset({"thing"}), node.admission))
        assert receiver.ready.is_set()
        receiver.add_demand(5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.bus.send, command(1))
            await wait_all_tasks_blocked()
            assert not node.admission.leases
            receiver.open()
        assert numbers(await receiver.receive_batch(9)) == [1]

    async def test_before_the_runtime_takes_anything_and_after_a_stop_request_a_send_is_refused(self) -> None:
        node = Node()
        node.receiver(demand=5)
        node.admission.close_intake()
        with pytest.raises(AdmissionClosedError, match="receiver group:context"):
            await node.bus.send(command(1))

    async def test_a_stop_request_refuses_the_sends_that_wait(self) -> None:
        node = Node()
        receiver = node.receiver()
        errors: list[BaseException | None] = []

        async with trio.open_nursery() as nursery:
            for number in (1, 2):
                nursery.start_soon(collect, partial(node.bus.send, command(number)), errors)
            await wait_all_tasks_blocked()
            node.admission.close_intake()
        assert [type(error) for error in errors] == [AdmissionClosedError] * 2
        receiver.close()
        with pytest.raises(trio.EndOfChannel):
            await receiver.receive_batch(9)

    async def test_a_message_is_handed_to_all_groups_or_to_none(self) -> None:
        node = Node(InMemoryDomainEventBus())
        first, second = node.receiver("first", demand=5), node.receiver("second")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.bus.send, stream())
            await wait_all_tasks_blocked()
            assert not node.admission.leases
            second.add_demand(1)
        assert len(await first.receive_batch(9)) == len(await second.receive_batch(9)) == 1


class TestFromInside:
    async def test_a_send_never_waits_and_is_counted_as_overdraft(self) -> None:
        node = Node()
        receiver = node.receiver(demand=1)
        lease = node.admission.try_acquire()
        assert lease is not None
        with lease, trio.fail_after(1):
            for number in range(4):
                await node.bus.send(command(number))
        assert node.admission.is_overdrawn
        assert numbers(await receiver.receive_batch(1)) == [0, 1, 2, 3]
        receiver.add_demand(2)
        assert node.admission.is_overdrawn
        receiver.add_demand(1)
        assert not node.admission.is_overdrawn

    async def test_while_any_receiver_is_overdrawn_none_takes_anything_from_outside(self) -> None:
        node = Node()
        thing, other = node.receiver(), node.receiver("other", frozenset({"other"}), demand=9)
        elsewhere = Node()
        elsewhere.receiver(demand=1)
        lease = node.admission.try_acquire()
        assert lease is not None
        with lease:
            await node.bus.send(command(0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.bus.send, command(1, aggregate="other"))
            await wait_all_tasks_blocked()
            assert len(node.admission.leases) == 1
            with trio.fail_after(1):
                await elsewhere.bus.send(command(2))  # another runtime
            thing.add_demand(1)
        assert numbers(await other.receive_batch(9)) == [1]

    async def test_a_send_passes_those_from_outside_that_wait(self) -> None:
        node = Node()
        receiver = node.receiver()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.bus.send, command(1))
            await wait_all_tasks_blocked()
            lease = node.admission.try_acquire()
            assert lease is not None
            with lease:
                await node.bus.send(command(2))
            assert numbers(await receiver.receive_batch(9)) == [2]
            receiver.add_demand(2)
        assert numbers(await receiver.receive_batch(9)) == [1]

    async def test_is_still_admitted_after_a_stop_request_and_refused_once_admission_has_closed(self) -> None:
        node = Node()
        receiver = node.receiver(demand=9)
        lease = node.admission.try_acquire()
        assert lease is not None
        with lease:
            node.admission.close_intake()
            await node.bus.send(command(1))
            node.admission.close()
            with pytest.raises(AdmissionClosedError):
                await node.bus.send(command(2))
        assert numbers(await receiver.receive_batch(9)) == [1]

    async def test_a_task_that_outlives_its_message_counts_as_outside(self) -> None:
        node = Node()
        node.receiver()
        sent: list[int] = []

        async def late() -> None:
            await node.bus.send(command(1))
            sent.append(1)

        async with trio.open_nursery() as nursery:
            lease = node.admission.try_acquire()
            assert lease is not None
            with lease:
                nursery.start_soon(late)
            await wait_all_tasks_blocked()
            assert sent == []
            nursery.cancel_scope.cancel()

    async def test_the_receivers_lease_is_taken_at_hand_over_and_closed_by_a_discard(self) -> None:
        node = Node()
        receiver = node.receiver(demand=1)
        await node.bus.send(command(1))
        assert [lease.name for lease in node.admission.leases] == ["Do for context.thing/1, in group"]
        (exchange,) = await receiver.receive_batch(9)
        MessageExchange.discard(exchange)
        exchange.discard()
        assert not node.admission.leases

    async def test_closing_an_overdrawn_receiver_ends_its_overdraft(self) -> None:
        node = Node()
        receiver = node.receiver()
        lease = node.admission.try_acquire()
        assert lease is not None
        with lease:
            await node.bus.send(command(1))
        receiver.close()
        receiver.close()
        assert not node.admission.is_overdrawn
        receiver.add_demand(5)
        assert numbers(await receiver.receive_batch(9)) == [1]
        with pytest.raises(trio.EndOfChannel):
            await receiver.receive_batch(9)


class TestReceivers:
    async def test_a_message_is_the_buss_own_once_it_is_sent(self) -> None:
        node = Node(InMemoryDomainEventBus())
        receivers = [node.receiver(name) for name in ("a", "b")]
        message = stream(headers={"h": "1"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.bus.send, message)
            await wait_all_tasks_blocked()
            message.headers["h"] = 2  # type: ignore[assignment]
            with pytest.raises(SerializationError, match="headers hold text only, not 2"):
                await node.bus.send(message)
            for receiver in receivers:
                receiver.add_demand(1)
        for receiver in receivers:
            (exchange,) = await receiver.receive_batch(9)
            assert exchange.message.headers == {"h": "1"}

    async def test_a_full_receiver_holds_up_only_what_is_for_it(self) -> None:
        node = Node()
        full, free = node.receiver("things"), node.receiver("others", frozenset({"other"}), demand=2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.bus.send, command(1))
            await wait_all_tasks_blocked()
            with trio.fail_after(1):
                await node.bus.send(command(2, aggregate="other"))
            full.add_demand(1)
        assert numbers(await free.receive_batch(9)) == [2]
        assert numbers(await full.receive_batch(9)) == [1]

    async def test_a_send_that_waits_is_not_overtaken_at_any_of_its_receivers(self) -> None:
        node = Node(InMemoryDomainEventBus())
        full, free = node.receiver("full"), node.receiver("free", frozenset({"thing", "other"}), demand=1)
        node.receiver("bystander", frozenset({"else"}), demand=1)
        other = DomainEventStream(
            aggregate_id=AggregateId("context", "other", "1"),
            version=1,
            events=(Do("1"),),
            command_id="c",
            request_id="r",
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.bus.send, stream())
            await wait_all_tasks_blocked()
            nursery.start_soon(node.bus.send, other)
            await wait_all_tasks_blocked()
            assert not node.admission.leases
            full.add_demand(1)
            await wait_all_tasks_blocked()
            (first,) = await free.receive_batch(9)
            assert first.message.aggregate_id.aggregate == "thing"
            free.add_demand(1)
        (second,) = await free.receive_batch(9)
        assert second.message is not other
        assert second.message == other

    async def test_a_bus_serves_one_runtime_at_a_time(self) -> None:
        bus = InMemoryCommandBus()
        first = Node(bus).receiver()
        with pytest.raises(RuntimeStateError, match="InMemoryCommandBus serves one runtime at a time"):
            Node(bus).receiver()
        first.close()
        Node(bus).receiver()

    async def test_abandoning_a_receiver_closes_the_leases_of_what_it_holds(self) -> None:
        node = Node()
        receiver = node.receiver(demand=2)
        await node.bus.send(command(1))
        await node.bus.send(command(2))
        receiver.abandon()
        receiver.abandon()
        assert not node.admission.leases
        with pytest.raises(trio.EndOfChannel):
            await receiver.receive_batch(9)


class TestGroups:
    async def test_each_group_gets_its_own_copy(self) -> None:
        node = Node(InMemoryDomainEventBus())
        receivers = [node.receiver(name, demand=1) for name in ("a", "b")]
        message = stream(headers={"route": "original"})
        await node.bus.send(message)
        copies = [(await receiver.receive_batch(1))[0].message for receiver in receivers]
        assert copies == [message, message]
        copies[0].headers["route"] = "changed"
        assert copies[1].headers == message.headers == {"route": "original"}

    async def test_receivers_of_one_group_share_the_messages_by_id(self) -> None:
        node = Node()
        receivers = [node.receiver(demand=99) for _ in range(3)]
        for number in range(60):
            await node.bus.send(command(number, id=str(number % 20)))
        batches = []
        for receiver in receivers:
            receiver.close()
            batch = await collect_all(receiver)
            assert numbers(batch) == sorted(numbers(batch))
            batches.append({exchange.message.aggregate_id.id for exchange in batch})
        assert sum(map(len, batches)) == 20
        assert all(batches)

    async def test_only_subscribed_aggregates_arrive(self) -> None:
        node = Node()
        receiver = node.receiver(demand=5)
        assert await node.bus.send_if_subscribed(command(1))
        assert not await node.bus.send_if_subscribed(command(2, aggregate="other"))
        await node.bus.send(command(3, aggregate="other"))
        receiver.close()
        assert not await node.bus.send_if_subscribed(command(4))
        assert numbers(await receiver.receive_batch(9)) == [1]

    async def test_nobody_was_ever_subscribed(self) -> None:
        assert not await InMemoryCommandBus().send_if_subscribed(command(1))

    async def test_a_receiver_waits_for_messages_and_a_close_wakes_it(self) -> None:
        node = Node()
        receiver = node.receiver(demand=5)
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                assert numbers(await receiver.receive_batch(9)) == [1]
                with pytest.raises(trio.EndOfChannel):
                    await receiver.receive_batch(9)

            nursery.start_soon(receive)
            await wait_all_tasks_blocked()
            await node.bus.send(command(1))
            await wait_all_tasks_blocked()
            receiver.close()


async def collect_all(receiver: Any) -> list[Any]:
    try:
        return list(await receiver.receive_batch(99))
    except trio.EndOfChannel:
        return []
