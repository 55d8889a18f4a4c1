"""The component that listens for clients."""

import logging
import ssl
from collections.abc import Awaitable, Callable

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest
from wsproto.utilities import LocalProtocolError

from trio_wow.adapters.websocket._connection import Connection
from trio_wow.adapters.websocket._feed import EventFeed, ProjectionChanges, Subscriptions
from trio_wow.adapters.websocket._fragments import WholeMessages
from trio_wow.adapters.websocket._protocol import SUBPROTOCOL
from trio_wow.adapters.websocket._reader import HostedReader
from trio_wow.adapters.websocket._settings import Handshake, Identity, WebsocketSettings
from trio_wow.buses import DomainEventBus
from trio_wow.domain import Domain
from trio_wow.errors import RuntimeStateError
from trio_wow.gateway import CommandGateway
from trio_wow.runtime import RuntimeContext

__all__ = ["WebsocketGateway"]

_log = logging.getLogger("trio_wow.adapters.websocket")

_CLOSED = "commands are not taken yet, or no more"
_STOPPING = "the server is stopping"

_Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class WebsocketGateway:
    """Takes commands over websockets, and tells clients of results, events and changes of projections.

    A runtime component: put it last, after the `CommandGateway` (`App.add_gateway` does). It listens from `prepare` on;
    until commands are taken, clients are refused with 503. At the stop request it listens no more. What is under way
    goes on; when the runtime is quiet, what waits is sent, and every client closed with 1001.

    Args:
        domain: reads commands and writes events.
        gateway: where commands go.
        port: to listen on; 0 for one that is free.
        host: the address to listen on.
        ssl_context: for `wss://`; without it, `ws://`.
        authenticate: sees the opening handshake, and says who the client is; `None` refuses it with 401. Without it
            everybody may do everything. What it raises refuses with 500, and is logged.
        events: whose streams can be subscribed to. A bus that shares a group's messages among processes needs another
            `name` in each.
        changes: of the projections that can be subscribed to.
        settings: the bounds.
        name: the component, and its consumer group.

    Attributes:
        name: the component's name.
        subscriptions: those that are open; `len` counts them.
    """

    def __init__(
        self,
        domain: Domain,
        gateway: CommandGateway,
        *,
        port: int,
        host: str = "127.0.0.1",
        ssl_context: ssl.SSLContext | None = None,
        authenticate: Callable[[Handshake], Awaitable[Identity | None]] | None = None,
        events: DomainEventBus | None = None,
        changes: ProjectionChanges | None = None,
        settings: WebsocketSettings | None = None,
        name: str = "websocket-gateway",
    ) -> None:
        self.name = name
        self.subscriptions = Subscriptions()
        self._domain = domain
        self._gateway = gateway
        self._address = (host, port)
        self._ssl_context = ssl_context
        self._authenticate = authenticate
        self._feed = EventFeed(name, domain, events, self.subscriptions) if events is not None else None
        self._projections = changes.names if changes is not None else frozenset[str]()
        if changes is not None:
            changes.tell(self.subscriptions)
        self._settings = settings if settings is not None else WebsocketSettings()
        self._context: RuntimeContext | None = None
        self._reset()

    def _reset(self) -> None:
        self._listeners: list[trio.SocketListener] = []
        self._accepting = trio.CancelScope()
        self._streams = 0
        self._connections: set[Connection] = set()
        self._left = trio.Event()

    @property
    def port(self) -> int:
        """The port that it listens on.

        Raises:
            RuntimeStateError: it does not listen.
        """
        if not self._listeners:
            raise RuntimeStateError(f"{self.name} listens from prepare on", "NEW")
        port: int = self._listeners[0].socket.getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """How many clients are connected, their handshakes finished."""
        return len(self._connections)

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`.

        Raises:
            OSError: the port cannot be listened on.
        """
        self._reset()
        self._context = context
        host, port = self._address
        self._listeners = await trio.open_tcp_listeners(port, host=host)
        if self._feed is not None:
            await self._feed.prepare(context)

    def start(self) -> None:
        """See `RuntimeComponent.start`."""
        context = self._prepared()
        context.nursery.start_soon(self._accept, context, name=f"{self.name} listener")
        context.nursery.start_soon(self._close_door, context, name=f"{self.name} door")
        if self._feed is not None:
            self._feed.start()

    def quiesce(self) -> None:
        """See `RuntimeComponent.quiesce`."""
        self._accepting.cancel()
        if self._feed is not None:
            self._feed.quiesce()

    async def stop(self) -> None:
        """See `RuntimeComponent.stop`. Takes at most `close_timeout`, however little its clients read."""
        self.quiesce()
        if self._feed is not None:
            await self._feed.stop()
        for connection in self._connections:
            connection.close(1001, _STOPPING)
        while self._connections:
            self._left = trio.Event()
            await self._left.wait()
        for listener in self._listeners:
            await listener.aclose()
        if self._context is not None:
            self._context.nursery.cancel_scope.cancel()  # handshakes that have not come to their end

    def force_stop(self) -> None:
        """See `RuntimeComponent.force_stop`. Connections end with their tasks, without a closing handshake."""
        self.quiesce()
        for listener in self._listeners:
            listener.socket.close()

    def _prepared(self) -> RuntimeContext:
        if self._context is None:
            raise RuntimeError(f"{self.name} has not been prepared; put it into a Runtime")
        return self._context

    async def _close_door(self, context: RuntimeContext) -> None:
        await context.stop_requested.wait()
        self._accepting.cancel()

    async def _accept(self, context: RuntimeContext) -> None:
        with self._accepting:
            await trio.serve_listeners(self._serve_socket, self._listeners, handler_nursery=context.nursery)

    async def _serve_socket(self, stream: trio.SocketStream) -> None:
        if self._ssl_context is None:
            await self._serve(stream)
        else:
            # The TLS handshake is done at the first read, within the connection's own time.
            await self._serve(trio.SSLStream(stream, self._ssl_context, server_side=True, https_compatible=True))

    async def _serve(self, stream: _Stream) -> None:
        """Serve one client. Nothing that it does, and nothing that the library makes of it, ends the gateway."""
        if self._streams >= self._settings.max_connections:
            _log.warning("%s has %s connections; one more was closed", self.name, self._streams)
            return
        self._streams += 1
        try:
            async with trio.open_nursery() as nursery:
                socket = identity = None
                reader = HostedReader()
                hosted = await nursery.start(self._host, reader, stream, nursery.cancel_scope)
                with trio.move_on_after(self._settings.handshake_timeout), reader.handshake:
                    reader.begin()
                    limit = self._settings.max_message_size
                    # As `wrap_server_stream` does, which makes a `WSConnection` of its own.
                    websocket = WebSocketConnection(stream, WholeMessages(limit), max_message_size=limit)
                    hosted.start_soon(websocket._reader_task)
                    request = await websocket._get_request()
                    if (identity := await self._admit(request)) is not None:
                        socket = await request.accept(subprotocol=SUBPROTOCOL)
                if socket is not None and identity is not None:
                    await self._serve_client(socket, identity)
                    if socket.closed is not None and socket.closed.code == 1009:
                        await self._linger(stream, send_eof=True)
                nursery.cancel_scope.cancel()
        except* ConnectionClosed:
            _log.debug("a client of %s left in the middle of something", self.name)
        except* Exception as errors:
            _log.warning("a connection of %s failed", self.name, exc_info=errors)
        finally:
            self._streams -= 1

    async def _host(
        self,
        reader: HostedReader,
        stream: _Stream,
        scope: trio.CancelScope,
        *,
        task_status: trio.TaskStatus[trio.Nursery],
    ) -> None:
        await reader.run(task_status=task_status)
        if reader.error is not None:
            if not isinstance(reader.error, ConnectionClosed | LocalProtocolError):
                raise reader.error
            await self._linger(stream, send_eof=False)  # the close frame may still be on its way
            scope.cancel()

    async def _admit(self, request: WebSocketRequest) -> Identity | None:
        """Say who the client is, or refuse it."""
        identity: Identity | None = Identity()
        if not self._takes_commands():
            return await self._refuse(request, 503, _CLOSED)
        if SUBPROTOCOL not in request.proposed_subprotocols:
            return await self._refuse(request, 400, f"the sub-protocol must be {SUBPROTOCOL}")
        if self._authenticate is not None:
            headers = tuple(
                (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in request.headers
            )
            try:
                identity = await self._authenticate(Handshake(request.path, headers, str(request.remote)))
                if not isinstance(identity, Identity | None):
                    raise TypeError(f"authenticate must return an Identity or None, not {identity!r}")
            except Exception:
                _log.exception("authenticate of %s failed", self.name)
                return await self._refuse(request, 500, "who you are could not be found out")
            if identity is None:
                return await self._refuse(request, 401, "not authenticated")
            if not self._takes_commands():
                return await self._refuse(request, 503, _CLOSED)
        return identity

    def _takes_commands(self) -> bool:
        return self._prepared().admission.intake_is_open

    async def _refuse(self, request: WebSocketRequest, status: int, text: str) -> Identity | None:
        await request.reject(status, body=text.encode())
        return None

    async def _serve_client(self, socket: WebSocketConnection, identity: Identity) -> None:
        connection = Connection(
            socket,
            identity,
            self._domain,
            self._gateway,
            self.subscriptions,
            self._projections,
            self._feed is not None,
            self._settings,
        )
        self._connections.add(connection)
        if not self._takes_commands():  # no more: `stop` may have looked already for whom to close
            connection.close(1001, _STOPPING)
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)
            self._left.set()

    async def _linger(self, stream: _Stream, *, send_eof: bool) -> None:
        """Read to the end what the library has stopped to read; to close now would reset, and lose the close frame."""
        transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        with trio.move_on_after(self._settings.close_timeout):
            try:
                if send_eof:
                    await transport.send_eof()
                while await transport.receive_some(65_536):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
