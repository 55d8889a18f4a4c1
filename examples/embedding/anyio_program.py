"""An anyio program on the trio backend that has the runtime as one of its tasks."""

import signal

import anyio

from votes import Vote, app, results


async def cancel_at_signal(scope: anyio.CancelScope) -> None:
    """Cancel at Ctrl+C, which Python would else raise wherever the program is, perhaps in the middle of a handler."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for _ in received:
            scope.cancel()


async def main() -> None:
    """Serve beside the program's own work; at the end of it, or at its failure, stop in order."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_at_signal, tasks.cancel_scope)
        await tasks.start(app.runtime(signals=False).serve)
        for option in ("tea", "coffee", "tea"):
            await app.gateway.send_and_wait(Vote(option))
        tasks.cancel_scope.cancel()
    print(dict(results))


if __name__ == "__main__":
    anyio.run(main, backend="trio")
