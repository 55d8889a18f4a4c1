"""One accepted connection of the gateway."""

import logging

import orjson
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection

from trio_wow.adapters.websocket._feed import Subscriptions
from trio_wow.adapters.websocket._outgoing import Outgoing
from trio_wow.adapters.websocket._protocol import (
    FrameError,
    SendFrame,
    SubscribeFrame,
    error_frame,
    is_last,
    parse_frame,
    result_form,
    subscription_frame,
)
from trio_wow.adapters.websocket._settings import Identity, WebsocketSettings
from trio_wow.domain import Domain
from trio_wow.errors import (
    InvalidCommandError,
    InvalidIdentifierError,
    SerializationError,
    StageUnavailableError,
    UnknownMessageTypeError,
    UnroutableCommandError,
    WowError,
)
from trio_wow.gateway import CommandGateway
from trio_wow.messages import DEFAULT_TENANT, AggregateId, CommandResult

__all__ = ["Connection"]

_log = logging.getLogger("trio_wow.adapters.websocket")

_FIELDS: dict[type[Exception], str] = {
    UnknownMessageTypeError: "command.name",
    UnroutableCommandError: "command.name",
    InvalidCommandError: "command.body",
    InvalidIdentifierError: "command.body.id",
    SerializationError: "command.body",
    StageUnavailableError: "until",
}


class Connection:
    """Reads the frames of one client and answers them.

    Three tasks, and one for each command that waits for its signals. A command is handed to the bus before the next
    frame is read: that keeps their order, and a full window holds up the client that filled it.
    """

    def __init__(
        self,
        socket: WebSocketConnection,
        identity: Identity,
        domain: Domain,
        gateway: CommandGateway,
        subscriptions: Subscriptions,
        projections: frozenset[str] | None,
        has_events: bool,
        settings: WebsocketSettings,
    ) -> None:
        self._socket = socket
        self._identity = identity
        self._domain = domain
        self._gateway = gateway
        self._subscriptions = subscriptions
        self._projections = projections or frozenset()
        self._has_events = has_events
        self._settings = settings
        self.outgoing = Outgoing(settings)
        self._commands: dict[str, trio.CancelScope] = {}
        self._topics: dict[str, AggregateId | str] = {}
        self._pending = trio.Semaphore(settings.max_pending)
        self._reading = trio.CancelScope()
        self._closing: tuple[int, str] | None = None
        self._close_asked = trio.Event()

    def close(self, code: int, reason: str) -> None:
        """Read nothing more, send what waits, then close. Synchronous; the first call counts."""
        if self._closing is None:
            self._closing = (code, reason)
            self._close_asked.set()
            self._reading.cancel()

    def deliver(self, id: str, frame: bytes, /) -> None:
        """See `Subscriber`. Who does not keep up is closed: nobody else waits, and what is missed is no secret."""
        if self._closing is not None:
            return
        if len(frame) > self._settings.max_message_size:
            self._unsubscribe(id)
            text = f"there was a message of {len(frame)} bytes, and {self._settings.max_message_size} can be sent"
            frame = error_frame(id, "MessageTooLargeError", text)
        if not self.outgoing.offer(frame):
            self.outgoing.clear()
            self.close(1013, "subscriptions are read too slowly")

    async def serve(self) -> None:
        """Serve until either side closes."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope, name="websocket writer")
                nursery.start_soon(self._leave, nursery.cancel_scope, name="websocket closer")
                with self._reading:
                    await self._read(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            for id in tuple(self._topics):
                self._unsubscribe(id)

    async def _write(self, scope: trio.CancelScope) -> None:
        if not await self.outgoing.write(self._socket):
            _log.info("%s took nothing for %s s; cut off", self._socket.remote, self._settings.send_timeout)
        scope.cancel()

    async def _leave(self, scope: trio.CancelScope) -> None:
        await self._close_asked.wait()
        code, reason = self._closing or (1000, "")
        with trio.move_on_after(self._settings.close_timeout):
            await self.outgoing.drained()
            await self._socket.aclose(code, reason)
        scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        while True:
            try:
                data = await self._socket.get_message()
            except ConnectionClosed:
                return None
            try:
                # The library counts characters.
                if not isinstance(data, str):
                    raise FrameError("must be a text message, not a binary one")
                if len(data.encode()) > self._settings.max_message_size:
                    self.close(1009, f"more than {self._settings.max_message_size} bytes")
                    return await trio.lowlevel.checkpoint()
                await self._take(data, nursery)
            except FrameError as error:
                await self.outgoing.put(error_frame(error.id, "FrameError", error.text, error.field))

    async def _take(self, data: str, nursery: trio.Nursery) -> None:
        frame = parse_frame(data)
        if not isinstance(frame, SendFrame | SubscribeFrame):
            if (command := self._commands.pop(frame.id, None)) is not None:
                command.cancel()
            self._unsubscribe(frame.id)
            await self.outgoing.put(subscription_frame("unsubscribed", frame.id))
            return
        if frame.id in self._commands or frame.id in self._topics:
            raise FrameError(f"{frame.id!r} is in use", "id")
        tenant = self._tenant(frame)
        if isinstance(frame, SubscribeFrame):
            topic = self._topic(frame, tenant)
            self._topics[frame.id] = topic
            await self.outgoing.put(subscription_frame("subscribed", frame.id))
            self._subscriptions.add(topic, self, frame.id, tenant)
            return
        for name in frame.headers.keys() & self._identity.headers.keys():
            raise FrameError("is not the client's to set", f"headers.{name}", frame.id)
        await self._pending.acquire()
        handed_over = trio.Event()
        self._commands[frame.id] = scope = trio.CancelScope()
        nursery.start_soon(self._follow, frame, tenant, scope, handed_over, name="websocket command")
        await handed_over.wait()

    def _tenant(self, frame: SendFrame | SubscribeFrame) -> str:
        own = self._identity.tenant
        if own is not None and frame.tenant not in (None, own):
            raise FrameError(f"must be {own!r} or left out", "tenant", frame.id)
        return own or frame.tenant or DEFAULT_TENANT

    def _topic(self, frame: SubscribeFrame, tenant: str) -> AggregateId | str:
        if len(self._topics) >= self._settings.max_subscriptions:
            raise FrameError(f"there are {len(self._topics)} subscriptions already", "id", frame.id)
        if frame.projection is not None:
            if frame.projection not in self._projections:
                raise FrameError(f"{frame.projection!r} cannot be subscribed to here", "projection", frame.id)
            return frame.projection
        if not self._has_events or frame.aggregate_id is None:
            raise FrameError("events cannot be subscribed to here", "events", frame.id)
        try:
            aggregate_id = AggregateId(*frame.aggregate_id, tenant)
            self._domain.model_of(aggregate_id)
        except (KeyError, InvalidIdentifierError):
            raise FrameError("names no aggregate of this application", "events", frame.id) from None
        return aggregate_id

    def _unsubscribe(self, id: str) -> None:
        if (topic := self._topics.pop(id, None)) is not None:
            self._subscriptions.remove(topic, self, id)

    async def _follow(self, frame: SendFrame, tenant: str, scope: trio.CancelScope, handed_over: trio.Event) -> None:
        try:
            with scope:
                try:
                    command = self._domain.serializer.load_body(frame.command, "the frame")
                    async with self._gateway.stream(
                        command,
                        until=frame.until,
                        timeout=frame.timeout,
                        request_id=frame.request_id,
                        tenant=tenant,
                        headers={**frame.headers, **self._identity.headers},
                        expected_version=frame.expected_version,
                    ) as signals:
                        handed_over.set()
                        async for result in signals:
                            await self._signal(frame, result)
                except Exception as error:
                    await self.outgoing.put(_refusal(frame.id, error))
        finally:
            if self._commands.get(frame.id) is scope:  # else its ID was let go, and may be in use again
                del self._commands[frame.id]
            handed_over.set()
            self._pending.release()

    async def _signal(self, frame: SendFrame, result: CommandResult) -> None:
        kind = "result" if is_last(result, frame.until) else "signal"
        if kind == "signal" and not frame.signals:
            return
        data = orjson.dumps({"type": kind, "id": frame.id, "result": result_form(result)})
        if len(data) > self._settings.max_message_size:
            text = (
                f"the command has reached {result.stage.name}, version {result.version}, "
                f"and its result of {len(data)} bytes is more than can be sent"
            )
            data = error_frame(frame.id, "MessageTooLargeError", text)
        await self.outgoing.put(data)


def _refusal(id: str, error: Exception) -> bytes:
    if not isinstance(error, WowError):
        _log.error("a command could not be taken", exc_info=error)
        return error_frame(id, "InternalError", "the command could not be taken; the log of the server says why")
    field = next((name for kind, name in _FIELDS.items() if isinstance(error, kind)), None)
    return error_frame(id, type(error).__name__, str(error), field)
