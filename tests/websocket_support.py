"""Servers and clients on real sockets, for the tests of the websocket gateway."""

import json
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from hashlib import sha1
from typing import Any

import trio
import trustme
from attrs import define, frozen
from chain_domain import Chain, Notebook
from trio_websocket import WebSocketConnection, open_websocket

from trio_wow import App, CommandRejectedError, Reply, aggregate, on_command, on_event, on_sourcing, projection
from trio_wow.adapters.websocket import SUBPROTOCOL, ProjectionChanges, WebsocketGateway, WebsocketSettings
from trio_wow.dispatch import Handler, Handling
from trio_wow.runtime import Runtime

CA = trustme.CA()


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    CA.issue_cert("localhost").configure_cert(context)
    return context


def client_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    CA.configure_trust(context)
    return context


@frozen
class Deposit:
    id: str
    amount: int


@frozen
class Deposited:
    amount: int
    text: str = ""


@frozen
class Print:
    """Answers with so many letters."""

    id: str
    letters: int
    event: int = 0


@frozen
class Wait:
    """Is decided when the test says so."""

    id: str


@frozen
class Shout:
    id: str

    def validate(self) -> None:
        raise ValueError("nobody shouts")


@frozen
class Answer:
    """Is answered with so many lists, one in the other, or refused with a text that JSON cannot hold."""

    id: str
    depth: int = 0

    def validate(self) -> None:
        if self.depth < 0:
            raise ValueError("not \udc80")


class OverdrawnError(CommandRejectedError):
    code = "account.overdrawn"


class Gate:
    """Keeps commands waiting, and counts those that have come."""

    def __init__(self) -> None:
        self.came = 0
        self.opened = trio.Event()


@aggregate(context="bank")
@define
class Account:
    id: str
    balance: int = 0

    @on_command
    def deposit(self, command: Deposit) -> Reply[Deposited, int]:
        if command.amount <= 0:
            raise OverdrawnError("too little")
        return Reply(Deposited(command.amount), self.balance + command.amount)

    @on_command
    def print(self, command: Print) -> Reply[Deposited, str]:
        return Reply(Deposited(0, "e" * command.event), "x" * command.letters)

    @on_command
    def answer(self, command: Answer) -> Reply[Deposited, list[Any]]:
        if not command.depth:
            raise OverdrawnError("too \udc80")
        value: list[Any] = []
        for _ in range(command.depth - 1):
            value = [value]
        return Reply(Deposited(0), value)

    @on_command
    async def wait(self, command: Wait, gate: Gate) -> Deposited:
        gate.came += 1
        await gate.opened.wait()
        return Deposited(1)

    @on_command
    def shout(self, command: Shout) -> None: ...

    @on_sourcing
    def deposited(self, event: Deposited) -> None:
        self.balance += event.amount


@projection
class Balances:
    def __init__(self) -> None:
        self.seen = 0

    @on_event
    def deposited(self, event: Deposited) -> None:
        self.seen += 1


class Server:
    """An application behind a websocket gateway, with everything that can be subscribed to."""

    def __init__(self, *, settings: WebsocketSettings | None = None, dispatch: Any = None, **options: Any) -> None:
        self.gate = Gate()
        self.headers: list[dict[str, str]] = []
        changes = ProjectionChanges([Balances])

        async def note_headers(handling: Handling, proceed: Handler) -> object:
            if handling.dispatcher == "command-dispatcher":
                self.headers.append(dict(handling.message.headers))
            return await proceed(handling)

        self.app = App(
            [Account, Chain, Notebook],
            [Balances()],
            services={Gate: self.gate},
            filters=[note_headers],
            function_filters=[changes],
            **({"settings": dispatch} if dispatch else {}),
        )
        self.tls = options.get("ssl_context") is not None
        self.gateway = WebsocketGateway(
            self.app.domain,
            self.app.gateway,
            port=0,
            events=self.app.events,
            changes=changes,
            settings=settings,
            **options,
        )
        self.app.add_gateway(self.gateway)
        self.runtime: Runtime

    @property
    def url(self) -> str:
        return f"{'wss://localhost' if self.tls else 'ws://127.0.0.1'}:{self.gateway.port}/"

    @asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator["Server"]:
        options = {"signals": False, "shutdown_quiet_period": 0, **options}
        self.runtime = self.app.runtime(**options)
        async with self.app.serving(self.runtime):
            try:
                yield self
            finally:
                self.gate.opened.set()

    @asynccontextmanager
    async def raw(self, **options: Any) -> AsyncIterator["Raw"]:
        """Connect without the client of the package."""
        host, use_ssl = ("localhost", client_tls()) if self.tls else ("127.0.0.1", False)
        options = {"subprotocols": [SUBPROTOCOL], "disconnect_timeout": 5, **options}
        async with open_websocket(host, self.gateway.port, "/", use_ssl=use_ssl, **options) as socket:
            try:
                yield Raw(socket)
            finally:
                await socket.aclose()
                await trio.aclose_forcefully(socket._stream)  # the library leaves it open where the server closes

    async def refused(self, subprotocol: str = SUBPROTOCOL) -> bytes:
        """Return the answer to a handshake that is refused."""
        async with await trio.open_tcp_stream("127.0.0.1", self.gateway.port) as stream:
            await stream.send_all(handshake(subprotocol))
            return b"".join([part async for part in stream])

    async def streams(self, id: str = "a") -> list[Any]:
        aggregate_id = self.app.domain.aggregates[0].aggregate_id(id)
        return list(await self.app.store.load(aggregate_id))


@asynccontextmanager
async def pretender(
    behave: Callable[[trio.SocketStream], Awaitable[object]], subprotocol: str | None = SUBPROTOCOL
) -> AsyncIterator[str]:
    """Something that accepts the opening handshake as a gateway does, and then behaves; yields its URL."""

    async def serve(stream: trio.SocketStream) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += await stream.receive_some(65_536)
        key = next(line for line in request.splitlines() if line.lower().startswith(b"sec-websocket-key")).split()[1]
        answer = b"HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
        answer += b64encode(sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()) + b"\r\n"
        if subprotocol is not None:
            answer += f"Sec-WebSocket-Protocol: {subprotocol}\r\n".encode()
        await stream.send_all(answer + b"\r\n")
        with suppress(trio.BrokenResourceError):
            await behave(stream)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"ws://127.0.0.1:{listener.socket.getsockname()[1]}/"
        nursery.cancel_scope.cancel()


class Raw:
    """A connection that speaks frames."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self.socket = socket

    async def send(self, **frame: Any) -> None:
        await self.socket.send_message(json.dumps(frame, ensure_ascii=False))

    async def command(self, id: str, name: str, body: dict[str, Any], **more: Any) -> None:
        await self.send(type="send", id=id, command={"name": name, "body": body}, **more)

    async def receive(self) -> Any:
        return json.loads(await self.socket.get_message())

    async def ask(self, **frame: Any) -> Any:
        await self.send(**frame)
        return await self.receive()


def stalled(server: Server) -> None:
    """Give connections that come from now on small buffers, so that who does not read is noticed soon."""
    for listener in server.gateway._listeners:
        listener.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)


def handshake(subprotocol: str) -> bytes:
    """The request of an opening handshake."""
    return (
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: " + subprotocol.encode() + b"\r\n\r\n"
    )


async def tiny_reader(server: Server) -> trio.SocketStream:
    """Connect with a small receive buffer, do the opening handshake, and return the bare stream."""
    socket = trio.socket.socket()
    socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
    await socket.connect(("127.0.0.1", server.gateway.port))
    stream = trio.SocketStream(socket)
    await stream.send_all(handshake(SUBPROTOCOL))
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some(1)
    assert data.startswith(b"HTTP/1.1 101")
    return stream


def text_frame(text: str) -> bytes:
    """A text frame of a client, its mask all zeros."""
    data = text.encode()
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return b"\x81" + size + b"\0\0\0\0" + data


async def until(condition: Any) -> None:
    """Wait for something that happens on the other side of a socket."""
    while not condition():  # noqa: ASYNC110 - it polls what the gateway has no event for
        await trio.sleep(0.005)
