"""An asyncio server with the runtime inside: a client sends a line with an option, and gets its number of votes.

Ctrl+C stops it in order. Optional argument: the port.
"""

import asyncio
import sys

from trio_wow import App, DomainEvent, event_processor, on_event
from trio_wow.app import call_asyncio, serving_in_asyncio
from trio_wow.errors import AdmissionClosedError, RuntimeStateError
from votes import Option, Results, Vote, Voted


async def announce(text: str) -> None:
    """Stand for a client library that is made for asyncio."""
    await asyncio.sleep(0)
    print(text, flush=True)


@event_processor
class Announcer:
    """A handler, and so Trio code, that needs asyncio."""

    @on_event
    async def voted(self, event: DomainEvent[Voted]) -> None:
        """Announce each vote."""
        await call_asyncio(announce, f"a vote for {event.aggregate_id.id}")


results = Results()
app = App([Option], [results, Announcer()])


async def main(port: int) -> None:
    """Serve until it is cancelled, which is what `asyncio.run` does at Ctrl+C, or until the runtime fails."""
    async with serving_in_asyncio(app.runtime(signals=False)) as guest:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = (await reader.readline()).decode().strip()
            try:
                result = await guest.call(app.gateway.send_and_wait, Vote(option), timeout=10)
                text = str(result.raise_for_error().version)
            except (AdmissionClosedError, RuntimeStateError):
                text = "stopping"
            writer.write(f"{text}\n".encode())
            await writer.drain()
            writer.close()

        # The server is closed first, so that its last clients still find the runtime.
        async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
            print(f"port {server.sockets[0].getsockname()[1]}", flush=True)
            await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000))
    except KeyboardInterrupt:
        print(dict(results))
