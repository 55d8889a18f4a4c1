"""What is held at most: before a slow handler, and in chains that feed themselves. Shown by statistics, not by time."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from chain_domain import Chain, Note, Notebook, Step
from distributed_support import Network
from trio.testing import MockClock

from local_first import Sample, run_chains
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus, LocalFirstCommandBus
from trio_wow.dispatch import CommandDispatcher, FilterChain, Handler, Handling
from trio_wow.domain import Domain
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import CommandMessage
from trio_wow.runtime import Runtime

DOMAIN = Domain([Chain, Notebook])
PROGRAM = Path(__file__).parents[1] / "benchmarks" / "local_first.py"


@pytest.mark.parametrize("route", ["memory", "local-first"])
@pytest.mark.parametrize("window", [1, 8, 40])
async def test_a_fast_sender_before_a_slow_handler_fills_a_window_and_no_more(
    window: int, route: str, autojump_clock: MockClock
) -> None:
    network = Network()
    bus: Any = InMemoryCommandBus()
    if route == "local-first":
        bus = LocalFirstCommandBus(bus, network.bus("A"))
    executor = KeyedExecutor(max_in_flight=window)
    most = {"in flight": 0, "not finished": 0, "in the feed": 0}
    sent = {"chains": 0, "notes": 0}
    finished = {"chains": 0, "notes": 0}

    async def slow(handling: Handling, proceed: Handler) -> object:
        await trio.sleep(1)
        for dispatch in executor.statistics().dispatches:
            assert dispatch.overdraft == 0
            most["in flight"] = max(most["in flight"], dispatch.in_flight)
        for context in sent:
            most["not finished"] = max(most["not finished"], sent[context] - finished[context])
        unacknowledged = sum(len(group.unacknowledged) for group in network.groups.values())
        in_flight = sum(dispatch.in_flight for dispatch in executor.statistics().dispatches)
        not_finished = sum(sent.values()) - sum(finished.values())
        most["in the feed"] = max(most["in the feed"], unacknowledged - (in_flight - not_finished))
        await proceed(handling)
        finished[handling.message.aggregate_id.context] += 1
        return None

    async def send(context: str) -> None:
        for number in range(5 * window):
            body = Step(str(number % 20), number) if context == "chains" else Note(str(number % 20), "")
            message: CommandMessage = DOMAIN.command_message(body)
            await bus.send(message)
            sent[context] += 1

    store = InMemoryEventStore(DOMAIN.serializer)
    dispatcher = CommandDispatcher(DOMAIN, bus, store, InMemoryDomainEventBus(), filters=FilterChain([slow]))
    runtime = Runtime([dispatcher], executor=executor, signals=False, shutdown_timeout=10_000, shutdown_quiet_period=0)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        async with trio.open_nursery() as senders:
            for context in sent:  # two receivers, each with a window of its own
                senders.start_soon(send, context)
        runtime.request_stop()
    assert finished == sent == {"chains": 5 * window, "notes": 5 * window}
    assert most["in flight"] == window
    assert most["not finished"] <= window
    # Of each receiver's copies, what is not in its window waits in its feed: up to a sixteenth of the window.
    assert most["in the feed"] <= 2 * max(1, window // 16) if route == "local-first" else most["in the feed"] == 0


@pytest.mark.parametrize(("route", "commands"), [("memory", 300), ("local-first", 100)])
async def test_chains_of_32_hops_hold_no_more_than_their_windows_and_what_those_have_sent(
    route: str, commands: int
) -> None:
    window = 16
    run = await run_chains(route, commands, 32, senders=64, window=window, every=5)
    assert run.steps == commands * 33
    begun: list[Sample] = [each for each in run.samples if each.completed]
    assert begun
    # A chain is let in where the commands have room and nothing is overdrawn, and is then in one of two windows.
    assert window < run.most("under_way") <= 2 * window
    # It has two commands and two events there at most: what follows begins before what it followed from is finished.
    assert run.most("in_flight") <= 4 * window
    assert run.most("overdraft") <= 3 * window
    assert run.most("leases") <= 8 * window


def test_the_benchmark_runs() -> None:
    arguments = ("--commands", "3", "--hops", "4", "--senders", "2", "--window", "2")
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for route in ("memory", "local-first"):
        assert f"  {route}: 15 commands in " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--commands", "0"), "must be at least 1, not 0"), (("--route", "none"), "invalid choice: 'none'")],
)
def test_the_benchmark_refuses_a_wrong_argument(arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
