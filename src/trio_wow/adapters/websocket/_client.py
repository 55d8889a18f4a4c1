"""The client's side: a command gateway at the other end of a websocket."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

import orjson
import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection, wrap_client_stream

from trio_wow.adapters.websocket._outgoing import Outgoing
from trio_wow.adapters.websocket._protocol import SUBPROTOCOL, is_last, read_result
from trio_wow.adapters.websocket._reader import HostedReader
from trio_wow.adapters.websocket._settings import WebsocketSettings
from trio_wow.domain import Domain
from trio_wow.errors import (
    AdmissionClosedError,
    ConnectionLostError,
    ConnectionRefusedByServerError,
    InvalidCommandError,
    NoSubscriberError,
    RemoteError,
    StageUnavailableError,
    UnroutableCommandError,
    WaitAbandonedError,
    WaitTimeoutError,
    WowError,
)
from trio_wow.gateway import check_wait
from trio_wow.messages import DEFAULT_TENANT, CommandMessage, CommandResult, Stage

__all__ = ["WebsocketCommandGateway", "is_websocket_url", "open_websocket_gateway"]

_EACH = len(Stage) + 1  # signals and an error


class _Exchange:
    """One command, and what the server says of it: an async iterator of its signals for one task."""

    def __init__(self, message: CommandMessage, until: Stage, timeout: float) -> None:
        self.message = message
        self.until = until
        self.timeout = timeout
        self.deadline = inf if timeout == inf else trio.current_time() + timeout
        self.reached: str | None = None
        self.first: CommandResult | None = None  # taken already, and to be given once more
        self.is_over = False
        self.sending = trio.CancelScope(deadline=self.deadline)
        self._said, self._heard = trio.open_memory_channel[CommandResult | WowError](_EACH)

    def say(self, item: CommandResult | WowError) -> None:
        """Take what the server has said, or why it will say nothing more. What is said too much is dropped."""
        try:
            self._said.send_nowait(item)
        except (trio.WouldBlock, trio.ClosedResourceError):
            return
        if isinstance(item, WowError) or is_last(item, self.until):
            self.is_over = True
            self.sending.cancel()
            self._said.close()

    def __aiter__(self) -> "_Exchange":
        return self

    async def __anext__(self) -> CommandResult:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.first is not None:
            first, self.first = self.first, None
            return first
        try:
            item = await self._next()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        if isinstance(item, WowError):
            raise item
        self.reached = item.stage.name
        return item

    async def _next(self) -> CommandResult | WowError:
        try:
            return self._heard.receive_nowait()  # what came in time, even if the time is over now
        except trio.WouldBlock:
            with trio.move_on_at(self.deadline):
                return await self._heard.receive()
        return self.timed_out()

    def timed_out(self) -> WaitTimeoutError:
        """Return the error that says that the time is up."""
        return WaitTimeoutError(self.message.id, self.until.name, self.timeout, self.reached)

    def failed(self, error: Mapping[str, Any], url: str) -> WowError:
        """Return the error that the gateway in the server has raised."""
        code, text, field = error["code"], error["text"], error["field"]
        made: dict[str, WowError] = {
            AdmissionClosedError.__name__: AdmissionClosedError(url),
            InvalidCommandError.__name__: InvalidCommandError(type(self.message.body), text),
            NoSubscriberError.__name__: NoSubscriberError(self.message.aggregate_id),
            StageUnavailableError.__name__: StageUnavailableError(self.until.name),
            UnroutableCommandError.__name__: UnroutableCommandError(type(self.message.body)),
            WaitAbandonedError.__name__: WaitAbandonedError(self.message.id, self.reached),
            WaitTimeoutError.__name__: self.timed_out(),
        }
        return made.get(code) or RemoteError(code, text, field)


class WebsocketCommandGateway:
    """Sends commands to a `WebsocketGateway`, and tells their senders what became of them: as `CommandGateway` does.

    Made by `open_websocket_gateway`. The methods are those of `CommandGateway`, and so are their arguments, results and
    errors, with these differences:

    - `ConnectionLostError`, a `WaitAbandonedError`, says that the connection has ended. The command may have been sent.
    - `RemoteError` stands for what the server refuses with an error that has no meaning here.
    - A cancelled call, `send` too, may have sent the command.
    - In `WaitTimeoutError`, `reached` is `SENT` once the command was on its way; whether it has arrived is not known.
    - `tenant` and `headers` are refused where the server's authentication says what they are.
    - `command_id` of a result is the server's; errors of a wait name the message here.

    Several tasks may use one. Their commands reach the server in the order in which they were sent.
    """

    def __init__(self, domain: Domain, socket: WebSocketConnection, url: str, settings: WebsocketSettings) -> None:
        self._domain = domain
        self._socket = socket
        self._url = url
        self._settings = settings
        self._outgoing = Outgoing(settings)
        self._exchanges: dict[str, _Exchange] = {}
        self._lost: str | None = None

    async def send(
        self,
        command: Any,
        *,
        request_id: str | None = None,
        tenant: str = DEFAULT_TENANT,
        headers: Mapping[str, str] | None = None,
        expected_version: int | None = None,
    ) -> CommandResult:
        """See `CommandGateway.send` and the class."""
        message = self._message(command, request_id, tenant, headers, expected_version)
        async with self._exchanging(message, Stage.SENT, inf) as exchange:
            return await anext(exchange)

    async def send_and_wait(
        self,
        command: Any,
        *,
        until: Stage = Stage.PROCESSED,
        timeout: float = 30.0,  # noqa: ASYNC109 - as for `CommandGateway`
        request_id: str | None = None,
        tenant: str = DEFAULT_TENANT,
        headers: Mapping[str, str] | None = None,
        expected_version: int | None = None,
    ) -> CommandResult:
        """See `CommandGateway.send_and_wait` and the class."""
        check_wait(until, timeout)
        message = self._message(command, request_id, tenant, headers, expected_version)
        async with self._exchanging(message, until, timeout) as exchange:
            while not is_last(result := await anext(exchange), until):
                pass
            return result

    @asynccontextmanager
    async def stream(
        self,
        command: Any,
        *,
        until: Stage = Stage.PROCESSED,
        timeout: float = 30.0,  # noqa: ASYNC109 - as for `CommandGateway`
        request_id: str | None = None,
        tenant: str = DEFAULT_TENANT,
        headers: Mapping[str, str] | None = None,
        expected_version: int | None = None,
    ) -> AsyncGenerator[AsyncIterator[CommandResult], None]:
        """See `CommandGateway.stream` and the class."""
        check_wait(until, timeout)
        message = self._message(command, request_id, tenant, headers, expected_version)
        async with self._exchanging(message, until, timeout) as exchange:
            exchange.first = await anext(exchange)
            yield exchange

    def _message(
        self,
        command: Any,
        request_id: str | None,
        tenant: str,
        headers: Mapping[str, str] | None,
        expected_version: int | None,
    ) -> CommandMessage:
        return self._domain.command_message(
            command, request_id=request_id, tenant=tenant, headers=headers, expected_version=expected_version
        )

    @asynccontextmanager
    async def _exchanging(
        self,
        message: CommandMessage,
        until: Stage,
        timeout: float,  # noqa: ASYNC109
    ) -> AsyncGenerator[_Exchange, None]:
        form: dict[str, object] = {
            "type": "send",
            "id": message.id,
            "command": orjson.Fragment(self._domain.serializer.dump_body(message.body)),
            "until": until.name,
            "timeout": None if timeout == inf else float(timeout),
            "signals": True,
            "request_id": message.request_id,
        }
        if message.expected_version is not None:
            form["expected_version"] = message.expected_version
        if message.aggregate_id.tenant != DEFAULT_TENANT:
            form["tenant"] = message.aggregate_id.tenant
        if message.headers:
            form["headers"] = message.headers
        data = orjson.dumps(form)
        if len(data) > self._settings.max_message_size:
            raise RemoteError(
                "MessageTooLargeError",
                f"{len(data)} bytes, and {self._settings.max_message_size} can be sent",
                "command",
            )
        exchange = _Exchange(message, until, timeout)
        if self._lost is not None:
            raise self._lost_for(exchange)
        self._exchanges[message.id] = exchange
        try:
            with exchange.sending:
                await self._outgoing.put(data)
                exchange.reached = Stage.SENT.name
            if exchange.reached is None:
                raise self._lost_for(exchange) if exchange.is_over else exchange.timed_out()
            yield exchange
        finally:
            del self._exchanges[message.id]
            if not exchange.is_over and exchange.reached is not None:
                # The server would wait on; it does so no longer than the timeout if this finds no room.
                self._outgoing.offer(orjson.dumps({"type": "unsubscribe", "id": message.id}))

    async def aclose(self) -> None:
        """Send what waits, and close: within `close_timeout`."""
        with trio.move_on_after(self._settings.close_timeout):
            if self._lost is None:
                await self._outgoing.drained()
            await self._socket.aclose()

    async def run(self) -> None:
        """Send and receive, until the connection has ended."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope, name="websocket writer")
                await self._read()
                nursery.cancel_scope.cancel()
        finally:
            self._lost = self._lost or "it was closed"
            for exchange in self._exchanges.values():
                exchange.say(self._lost_for(exchange))

    async def _write(self, scope: trio.CancelScope) -> None:
        if not await self._outgoing.write(self._socket):
            self._lost = f"the server took nothing for {self._settings.send_timeout} s"
            scope.cancel()

    async def _read(self) -> None:
        try:
            while True:
                self._take(orjson.loads(await self._socket.get_message()))
        except ConnectionClosed as closed:
            self._lost = "its bytes stopped to make sense" if closed.reason is None else str(closed.reason)
        except (ValueError, KeyError, TypeError) as error:
            self._lost = f"the server sent what is no frame: {error!r}"
            with trio.move_on_after(self._settings.close_timeout):
                await self._socket.aclose(1002)

    def _take(self, frame: Mapping[str, Any]) -> None:
        exchange = self._exchanges.get(frame["id"] or "")
        if exchange is None:  # one that nobody waits for any more
            return
        if frame["type"] in ("signal", "result"):
            exchange.say(read_result(frame["result"]))
        elif frame["type"] == "error":
            exchange.say(exchange.failed(frame["error"], self._url))

    def _lost_for(self, exchange: _Exchange) -> ConnectionLostError:
        message = exchange.message
        return ConnectionLostError(message.id, message.request_id, exchange.reached, self._lost or "it was closed")


@asynccontextmanager
async def open_websocket_gateway(
    url: str,
    domain: Domain,
    *,
    ssl_context: ssl.SSLContext | None = None,
    headers: Mapping[str, str] | None = None,
    settings: WebsocketSettings | None = None,
) -> AsyncGenerator[WebsocketCommandGateway, None]:
    """Connect to a `WebsocketGateway`, for as long as the `async with` block runs.

    It does not connect again: a block that meets a `ConnectionLostError` is left, and entered anew.

    Args:
        url: such as `wss://example.org:8443/`.
        domain: names the commands, and checks them before they are sent.
        ssl_context: for `wss://`; by default one that trusts what the system trusts.
        headers: of the opening handshake, for the server's authentication.
        settings: the bounds of this side: `handshake_timeout` for connecting, `close_timeout`, `send_timeout`,
            `heartbeat`, `max_message_size` and those of the queue.

    What the block raises is raised as it is; in a group only if there is a second error, or a cancellation.

    Raises:
        ConnectionRefusedByServerError: it could not be connected to, or nobody there speaks the sub-protocol.
        ValueError: the URL is not legal.

    Cancellation: ends the connection.
    """
    settings = settings if settings is not None else WebsocketSettings()
    if not is_websocket_url(url):
        raise ValueError(f"url must be like wss://host:port/path, not {url!r}")
    parts = urlsplit(url)
    failure: BaseException | None = None
    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] | None = None
    socket: WebSocketConnection | None = None
    reader = HostedReader()
    try:
        async with trio.open_nursery() as nursery:
            reading = await nursery.start(reader.run, name="websocket reader")
            try:
                with trio.fail_after(settings.handshake_timeout), reader.handshake:
                    stream = await _open_stream(parts, ssl_context)
                    reader.begin()
                    socket = await wrap_client_stream(
                        reading,
                        stream,
                        parts.netloc,
                        urlunsplit(("", "", parts.path or "/", parts.query, "")),
                        subprotocols=[SUBPROTOCOL],
                        extra_headers=[(name.encode(), value.encode()) for name, value in (headers or {}).items()],
                        max_message_size=settings.max_message_size,
                    )
            except (OSError, UnicodeError, trio.TooSlowError, trio.BrokenResourceError) as error:
                reason = f"no answer within {settings.handshake_timeout} s" if stream else repr(error)
                failure = ConnectionRefusedByServerError(url, reason)
                failure.__cause__ = error
            else:
                if socket is None or socket.subprotocol != SUBPROTOCOL:
                    failure = _refused(url, reader.error, answered=socket is not None)
                else:
                    gateway = WebsocketCommandGateway(domain, socket, url, settings)
                    nursery.start_soon(gateway.run, name="websocket client")
                    try:
                        yield gateway
                    except (Exception, KeyboardInterrupt, SystemExit) as error:  # raised as it is, in no group
                        failure = error
                    await gateway.aclose()
            nursery.cancel_scope.cancel()
    except BaseException as error:
        if failure is None:
            raise
        raise BaseExceptionGroup("errors of a websocket client", [failure, error]) from None
    finally:
        if stream is not None:
            with trio.CancelScope(shield=True):  # it does not wait, but a `Cancelled` of its own would hide an error
                await trio.aclose_forcefully(stream)  # the library leaves it open where the server closes first
    if failure is not None:
        raise failure


def is_websocket_url(url: str) -> bool:
    """Whether `open_websocket_gateway` takes a URL: `wss://host:port/path`, or `ws:`, or less after the host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of an address that is none, or of a port, which is looked at when it is asked for
        return False


def _refused(url: str, error: Exception | None, *, answered: bool) -> ConnectionRefusedByServerError:
    if isinstance(error, ConnectionRejected):
        text = (error.body or b"").decode(errors="replace")
        return ConnectionRefusedByServerError(url, f"{error.status_code} {text}", error.status_code)
    if error is None and not answered:
        return ConnectionRefusedByServerError(url, "closed without an answer")
    refused = ConnectionRefusedByServerError(url, f"nobody there speaks {SUBPROTOCOL}")
    refused.__cause__ = error
    return refused


async def _open_stream(
    parts: SplitResult, ssl_context: ssl.SSLContext | None
) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    host = parts.hostname or ""
    if parts.scheme == "ws":
        return await trio.open_tcp_stream(host, parts.port or 80)
    secure = await trio.open_ssl_over_tcp_stream(
        host, parts.port or 443, ssl_context=ssl_context, https_compatible=True
    )
    try:
        await secure.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(secure)
        raise
    return secure
