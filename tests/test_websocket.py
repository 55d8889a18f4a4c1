"""The websocket gateway, spoken to in frames and through the package's client, on real sockets."""

import json
import logging
import socket as sockets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from chain_domain import Chain, Note, Notebook, Step
from test_waiting import Noting, Put, Shelf, View, Watcher
from trio_websocket import ConnectionClosed, WebSocketRequest
from websocket_support import (
    Answer,
    Deposit,
    Print,
    Server,
    Shout,
    Wait,
    client_tls,
    pretender,
    server_tls,
    stalled,
    text_frame,
    tiny_reader,
    until,
)

from trio_wow import App, Settings, Stage
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.adapters.websocket import (
    Handshake,
    Identity,
    WebsocketGateway,
    WebsocketSettings,
    is_websocket_url,
    open_websocket_gateway,
)
from trio_wow.app import DispatchSettings
from trio_wow.domain import Domain
from trio_wow.errors import (
    AdmissionClosedError,
    ConnectionLostError,
    ConnectionRefusedByServerError,
    InvalidCommandError,
    RemoteError,
    RuntimeStateError,
    StageUnavailableError,
    WaitTimeoutError,
)
from trio_wow.runtime import Runtime


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server().serving() as server:
        yield server


class TestCommands:
    async def test_a_result_is_what_the_local_gateway_gives(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Deposit", {"id": "a", "amount": 5}, request_id="r1")
            frame = await raw.receive()
        assert (frame["type"], frame["id"]) == ("result", "c1")
        result = frame["result"]
        assert (result["request_id"], result["stage"], result["version"], result["value"], result["error"]) == (
            "r1",
            "PROCESSED",
            1,
            5,
            None,
        )

    async def test_signals_come_stage_by_stage_when_they_are_wanted(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Deposit", {"id": "a", "amount": 5}, until="PROJECTED", signals=True)
            frames = [await raw.receive() for _ in range(3)]
        assert [(each["type"], each["result"]["stage"]) for each in frames] == [
            ("signal", "SENT"),
            ("signal", "PROCESSED"),
            ("result", "PROJECTED"),
        ]

    async def test_a_rejection_is_a_result_with_an_error(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Deposit", {"id": "a", "amount": 0}, until="PROJECTED")
            frame = await raw.receive()
        assert frame["type"] == "result"
        assert frame["result"]["error"] == {"code": "account.overdrawn", "text": "too little", "undecided": False}

    async def test_commands_of_one_connection_reach_an_aggregate_in_order(self, server: Server) -> None:
        async with server.raw() as raw, trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(200):
                    await raw.command(str(number), "Deposit", {"id": "a", "amount": number + 1})

            nursery.start_soon(send)
            versions = {}
            for _ in range(200):
                frame = await raw.receive()
                versions[frame["id"]] = frame["result"]["version"]
        assert [versions[str(number)] for number in range(200)] == list(range(1, 201))

    async def test_an_id_can_be_used_again_when_it_has_ended_and_not_before(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Wait", {"id": "a"})
            error = await raw.ask(type="subscribe", id="c1", projection="Balances")
            assert (error["id"], error["error"]["code"], error["error"]["field"]) == (None, "FrameError", "id")
            server.gate.opened.set()
            assert (await raw.receive())["type"] == "result"
            await raw.command("c1", "Deposit", {"id": "a", "amount": 5})
            assert (await raw.receive())["result"]["version"] == 2

    async def test_who_waits_no_more_says_so_and_the_command_goes_on(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Wait", {"id": "a"})
            assert await raw.ask(type="unsubscribe", id="c1") == {"type": "unsubscribed", "id": "c1"}
            await until(lambda: not server.app.gateway.results.waiting)
            server.gate.opened.set()
            await raw.command("c1", "Deposit", {"id": "a", "amount": 5})
            assert (await raw.receive())["result"]["version"] == 2

    async def test_a_result_too_large_to_be_sent_says_that_the_command_stands(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Print", {"id": "a", "letters": 2**20})
            frame = await raw.receive()
            assert (frame["type"], frame["error"]["code"]) == ("error", "MessageTooLargeError")
            assert "has reached PROCESSED, version 1" in frame["error"]["text"]

    async def test_what_json_cannot_hold_of_an_errors_text_is_escaped(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Answer", {"id": "a"})
            assert (await raw.receive())["result"]["error"]["text"] == "too \\udc80"
            await raw.command("c2", "Answer", {"id": "a", "depth": -1})
            error = (await raw.receive())["error"]
            assert (error["code"], error["text"]) == ("InvalidCommandError", "Answer is not valid: not \\udc80")

    async def test_an_answer_may_be_as_deep_as_it_can_be(self, server: Server) -> None:
        for depth in (254, 255):  # and one more than that
            local = await server.app.gateway.send_and_wait(Answer("local", depth))
            async with open_websocket_gateway(server.url, server.app.domain) as gateway:
                remote = await gateway.send_and_wait(Answer("remote", depth))
            assert (remote.value, remote.error) == (local.value, local.error)
            assert (local.error is None) == (depth == 254)


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "field", "id"),
        [
            ("{", None, None),
            ("[" * 5000, None, None),
            ("[" * 1000 + "]" * 1000, None, None),
            ('{"id": ' + "[" * 1000 + "]" * 1000 + "}", "id", None),
            ('{"id": "c1", "type": "send", "command": ' + '{"a":' * 1000 + "1" + "}" * 1001, "command.name", "c1"),
            ('{"id": "c1", "type": "send", "headers": ' + "[" * 1000 + "]" * 1000 + "}", "command", "c1"),
            ("[]", None, None),
            ('"text"', None, None),
            ("{}", "id", None),
            ('{"id": 1}', "id", None),
            ('{"id": ""}', "id", None),
            (json.dumps({"id": "x" * 129}), "id", None),
            ('{"id": "c1"}', "type", "c1"),
            ('{"id": "c1", "type": "shout"}', "type", "c1"),
            ('{"id": "c1", "type": "send"}', "command", "c1"),
            ('{"id": "c1", "type": "send", "command": {"body": {}}}', "command.name", "c1"),
            ('{"id": "c1", "type": "send", "command": {"name": "Deposit"}}', "command.body", "c1"),
            ('{"id": "c1", "type": "unsubscribe", "more": 1}', "more", "c1"),
            ('{"id": "s1", "type": "subscribe"}', "events", "s1"),
            ('{"id": "s1", "type": "subscribe", "projection": "Other"}', "projection", "s1"),
            ('{"id": "s1", "type": "subscribe", "projection": "Balances", "events": {}}', "events", "s1"),
            ('{"id": "s1", "type": "subscribe", "events": {"context": "bank"}}', "events.aggregate", "s1"),
            (
                '{"id": "s1", "type": "subscribe", "events": {"context": "b", "aggregate": "c", "id": "d"}}',
                "events",
                "s1",
            ),
        ],
    )
    async def test_a_frame_that_is_not_legal_is_refused_and_the_connection_lives(
        self, server: Server, data: str, field: str | None, id: str | None
    ) -> None:
        async with server.raw() as raw:
            await raw.socket.send_message(data)
            frame = await raw.receive()
            assert (frame["type"], frame["id"], frame["error"]["code"]) == ("error", id, "FrameError")
            assert frame["error"]["field"] == field
            assert (await raw.ask(type="unsubscribe", id="u"))["type"] == "unsubscribed"

    @pytest.mark.parametrize(
        ("more", "field"),
        [
            ({"until": "DONE"}, "until"),
            ({"timeout": 0}, "timeout"),
            ({"timeout": True}, "timeout"),
            ({"timeout": "1"}, "timeout"),
            ({"expected_version": -1}, "expected_version"),
            ({"expected_version": 2**63}, "expected_version"),
            ({"expected_version": 1.5}, "expected_version"),
            ({"headers": {"a": 1}}, "headers.a"),
            ({"headers": []}, "headers"),
            ({"request_id": " "}, "request_id"),
            ({"tenant": "x" * 513}, "tenant"),
            ({"signals": 1}, "signals"),
            ({"color": "red"}, "color"),
        ],
    )
    async def test_each_option_of_a_command_is_checked(self, server: Server, more: dict[str, Any], field: str) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Deposit", {"id": "a", "amount": 5}, **more)
            frame = await raw.receive()
        assert (frame["id"], frame["error"]["field"]) == ("c1", field)
        assert await server.streams() == []

    @pytest.mark.parametrize(
        ("command", "code", "field", "text"),
        [
            (("Nothing", {"id": "a"}), "UnknownMessageTypeError", "command.name", "Nothing"),
            (("Deposited", {"amount": 1}), "UnroutableCommandError", "command.name", "Deposited"),
            (("Deposit", {"id": "a"}), "SerializationError", "command.body", "amount"),
            (("Deposit", {"id": "a", "amount": "x"}), "SerializationError", "command.body", "amount"),
            (("Deposit", {"id": "a", "amount": 1.5}), "SerializationError", "command.body", "body.amount"),
            (("Deposit", {"id": "a", "amount": 1, "tip": 2}), "SerializationError", "command.body", "body.tip"),
            (("Deposit", {"id": " ", "amount": 1}), "InvalidIdentifierError", "command.body.id", "blank"),
            (("Shout", {"id": "a"}), "InvalidCommandError", "command.body", "nobody shouts"),
        ],
    )
    async def test_a_command_that_cannot_be_taken_says_what_is_wrong(
        self, server: Server, command: tuple[str, dict[str, Any]], code: str, field: str, text: str
    ) -> None:
        async with server.raw() as raw:
            await raw.command("c1", *command)
            frame = await raw.receive()
        assert (frame["id"], frame["error"]["code"], frame["error"]["field"]) == ("c1", code, field)
        assert text in frame["error"]["text"]
        assert not server.app.gateway.results.waiting

    @pytest.mark.parametrize(
        "data",
        [
            '{"id": "c1", "type": "unsubscribe", "NAME": 1}',
            '{"id": "c1", "type": "send", "command": {"name": "NAME", "body": {}}}',
            '{"id": "c1", "type": "send", "command": {"name": "Deposit", "body": {"id": "a", "amount": 1, "NAME": 1}}}',
        ],
    )
    async def test_an_error_is_never_too_large_to_be_sent(self, data: str) -> None:
        settings = WebsocketSettings(max_message_size=50_000, queue_bytes=50_000)
        async with Server(settings=settings).serving() as server, server.raw() as raw:
            await raw.socket.send_message(data.replace("NAME", "n" * (50_000 + len("NAME") - len(data))))
            with trio.fail_after(20):
                frame = await raw.receive()
        assert frame["id"] == "c1"
        assert len(json.dumps(frame)) < 3_000
        assert "nnn..." in frame["error"]["text"] + (frame["error"]["field"] or "")

    async def test_a_revision_that_is_not_known_is_refused(self, server: Server) -> None:
        async with server.raw() as raw:
            command = {"name": "Deposit", "revision": 2, "body": {"id": "a", "amount": 1}}
            frame = await raw.ask(type="send", id="c1", command=command)
        assert "revision 2" in frame["error"]["text"]

    async def test_a_stage_of_which_nobody_tells(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.command("c1", "Deposit", {"id": "a", "amount": 5}, until="SAGA_HANDLED")
            error = (await raw.receive())["error"]
        assert (error["code"], error["field"]) == ("StageUnavailableError", "until")

    async def test_a_binary_message_is_refused(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.socket.send_message(b"{}")
            assert "binary" in (await raw.receive())["error"]["text"]

    async def test_a_frame_that_is_no_websocket_frame_ends_its_connection_only(self, server: Server) -> None:
        async with server.raw() as good:
            stream = await tiny_reader(server)
            await stream.send_all(b"\xff\xff\xff\xff\xff\xff")
            with trio.fail_after(10):
                while await stream.receive_some(100):
                    pass
            await stream.aclose()
            await good.command("c1", "Deposit", {"id": "a", "amount": 5})
            assert (await good.receive())["type"] == "result"

    @pytest.mark.parametrize("letter", ["x", "é"])
    async def test_a_message_over_the_limit_closes_that_client_only(self, server: Server, letter: str) -> None:
        """FS-24 (c): two MiB; in the second case too many bytes, though not too many characters."""
        async with server.raw() as good:
            async with server.raw() as raw:
                with pytest.raises(ConnectionClosed) as closed:
                    size = 2**21 if letter == "x" else 600_000
                    await raw.command("c1", "Deposit", {"id": letter * size, "amount": 5})
                    await raw.receive()
            assert closed.value.reason is not None
            assert closed.value.reason.code == 1009
            await good.command("c1", "Deposit", {"id": "a", "amount": 5})
            assert (await good.receive())["result"]["version"] == 1
        await until(lambda: not server.gateway.connections)


class TestFragments:
    async def test_a_message_may_come_letter_by_letter(self, server: Server) -> None:
        stream = await tiny_reader(server)
        letters = '{"type": "unsubscribe", "id": "é\U0001f600"}'
        frames = [text_frame(letter) for letter in ("", *letters, "", "")]
        for number, frame in enumerate(frames):  # all but the first continue it; the last ends it
            opcode = (0 if number else 1) | (0x80 if number == len(frames) - 1 else 0)
            await stream.send_all(bytes([opcode]) + frame[1:] + b"\x89\x80\0\0\0\0")
        answer = b""
        while not answer.endswith(b"}"):
            answer += await stream.receive_some(1_000)
        assert json.loads(answer[answer.index(b"{") :]) == {"type": "unsubscribed", "id": "é\U0001f600"}
        assert answer.count(b"\x8a\0") == len(frames)
        await stream.aclose()

    @pytest.mark.parametrize("letter", ["", "\U0001f600"])
    async def test_fragments_take_no_more_room_than_the_message(self, server: Server, letter: str) -> None:
        stream = await tiny_reader(server)
        await until(lambda: server.gateway.connections == 1)
        (connection,) = server.gateway._connections
        await stream.send_all(b"\1" + text_frame("x")[1:])
        await stream.send_all((b"\0" + text_frame(letter)[1:]) * 10_000 + b"\x89\x80\0\0\0\0")
        assert await stream.receive_some(2) == b"\x8a\0"  # all of them have been read
        assert len(connection._socket._message_parts) == 0
        await stream.aclose()

    async def test_a_message_over_the_limit_is_refused_before_its_end(self, server: Server) -> None:
        stream = await tiny_reader(server)
        part = text_frame("é" * 30_000)[1:]
        await stream.send_all(b"\1" + part)
        for _ in range(40):
            await stream.send_all(b"\0" + part)
        answer = await stream.receive_some(4)
        assert (answer[:1], answer[2:]) == (b"\x88", (1009).to_bytes(2, "big"))
        await stream.aclose()


class TestSubscriptions:
    async def test_an_aggregates_events_come_in_order_until_unsubscribed(self, server: Server) -> None:
        events = {"context": "bank", "aggregate": "account", "id": "a"}
        async with server.raw() as raw, server.raw() as other:
            assert await raw.ask(type="subscribe", id="s1", events=events) == {"type": "subscribed", "id": "s1"}
            for amount in (1, 2):
                for id in ("a", "b"):
                    await other.command("c", "Deposit", {"id": id, "amount": amount})
                    await other.receive()
            frames = [await raw.receive() for _ in range(2)]
            assert [frame["stream"]["version"] for frame in frames] == [1, 2]
            assert frames[1]["stream"]["events"] == [
                {"name": "Deposited", "revision": 1, "body": {"amount": 2, "text": ""}}
            ]
            assert (await raw.ask(type="unsubscribe", id="s1"))["type"] == "unsubscribed"
            assert len(server.gateway.subscriptions) == 0
            await other.command("c", "Deposit", {"id": "a", "amount": 3})
            await other.receive()
            assert (await raw.ask(type="unsubscribe", id="s1"))["type"] == "unsubscribed"

    async def test_a_projections_changes(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.ask(type="subscribe", id="s1", projection="Balances")
            await raw.command("c1", "Deposit", {"id": "a", "amount": 5}, until="PROJECTED")
            frames = {frame["type"]: frame for frame in [await raw.receive(), await raw.receive()]}
        assert frames["change"] == {
            "type": "change",
            "id": "s1",
            "projection": "Balances",
            "context": "bank",
            "aggregate": "account",
            "aggregate_id": "a",
            "version": 1,
        }

    async def test_who_leaves_leaves_no_subscription(self, server: Server) -> None:
        async with server.raw() as raw:
            await raw.ask(type="subscribe", id="s1", projection="Balances")
            assert len(server.gateway.subscriptions) == 1
        await until(lambda: not server.gateway.connections)
        assert len(server.gateway.subscriptions) == 0

    async def test_an_event_too_large_to_be_sent_ends_its_subscription(self, server: Server) -> None:
        events = {"context": "bank", "aggregate": "account", "id": "a"}
        async with server.raw() as raw:
            await raw.ask(type="subscribe", id="s1", events=events)
            await server.app.gateway.send_and_wait(Print("a", 0, event=2**20))
            frame = await raw.receive()
            assert (frame["id"], frame["error"]["code"]) == ("s1", "MessageTooLargeError")
            assert len(server.gateway.subscriptions) == 0

    async def test_too_many_subscriptions(self) -> None:
        async with Server(settings=WebsocketSettings(max_subscriptions=1)).serving() as server, server.raw() as raw:
            await raw.ask(type="subscribe", id="s1", projection="Balances")
            frame = await raw.ask(type="subscribe", id="s2", projection="Balances")
            assert (frame["id"], frame["error"]["field"]) == ("s2", "id")

    async def test_what_was_not_given_cannot_be_subscribed_to(self) -> None:
        server = Server()
        server.app._gateways.clear()
        server.gateway = WebsocketGateway(server.app.domain, server.app.gateway, port=0)
        server.app.add_gateway(server.gateway)
        async with server.serving(), server.raw() as raw:
            events = {"context": "bank", "aggregate": "account", "id": "a"}
            assert (await raw.ask(type="subscribe", id="s", events=events))["error"]["field"] == "events"
            frame = await raw.ask(type="subscribe", id="s", projection="Balances")
            assert frame["error"]["field"] == "projection"


async def by_token(handshake: Handshake) -> Identity | None:
    assert handshake.path == "/"
    token = handshake.header("X-Token")
    if token == "bug":
        raise ZeroDivisionError
    return None if token is None else Identity(token, {"owner": f"owner of {token}"})


class TestAuthentication:
    async def test_who_is_not_known_is_refused_with_401(self) -> None:
        async with Server(authenticate=by_token).serving() as server:
            assert (await server.refused()).startswith(b"HTTP/1.1 401")
            with pytest.raises(ConnectionRefusedByServerError, match="401 not authenticated") as refused:
                async with open_websocket_gateway(server.url, server.app.domain):
                    pass
            assert refused.value.status == 401

    async def test_a_hook_that_fails_refuses(self, caplog: pytest.LogCaptureFixture) -> None:
        async with Server(authenticate=by_token).serving() as server:
            with pytest.raises(ConnectionRefusedByServerError) as refused:
                async with open_websocket_gateway(server.url, server.app.domain, headers={"x-token": "bug"}):
                    pass
        assert refused.value.status == 500
        assert "ZeroDivisionError" in caplog.text

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda: Identity(""), "tenant '' is empty or blank"),
            (
                lambda: Identity("a", cast(Any, {"owner": 5})),
                "headers must be a mapping of text to text, not {'owner': 5}",
            ),
            (lambda: Identity("a", cast(Any, [])), "headers must be a mapping of text to text, not []"),
            (lambda: True, "authenticate must return an Identity or None, not True"),
        ],
    )
    async def test_who_is_no_legal_identity_is_refused(
        self, make: Any, why: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def authenticate(handshake: Handshake) -> Any:
            return make()

        async with Server(authenticate=authenticate).serving() as server:
            assert (await server.refused()).startswith(b"HTTP/1.1 500")
        assert why in caplog.text

    async def test_tenant_and_owner_are_put_on_every_command_and_cannot_be_chosen(self) -> None:
        async with Server(authenticate=by_token).serving() as server:
            async with server.raw(extra_headers=[(b"x-token", b"t1")]) as raw:
                await raw.command("c1", "Deposit", {"id": "a", "amount": 1}, headers={"color": "red"})
                assert (await raw.receive())["result"]["tenant"] == "t1"
                assert server.headers == [{"color": "red", "owner": "owner of t1"}]
                await raw.command("c1", "Deposit", {"id": "a", "amount": 1}, tenant="t2")
                assert (await raw.receive())["error"]["field"] == "tenant"
                await raw.command("c1", "Deposit", {"id": "a", "amount": 1}, headers={"owner": "me"})
                assert (await raw.receive())["error"]["field"] == "headers.owner"
                assert len(await server.streams()) == 1

    async def test_the_events_of_another_tenant_are_not_told(self) -> None:
        events = {"context": "bank", "aggregate": "account", "id": "a"}
        async with Server(authenticate=by_token).serving() as server:
            async with (
                server.raw(extra_headers=[(b"x-token", b"t1")]) as one,
                server.raw(extra_headers=[(b"x-token", b"t2")]) as two,
            ):
                for raw in (one, two):
                    await raw.ask(type="subscribe", id="s1", events=events)
                    await raw.ask(type="subscribe", id="s2", projection="Balances")
                await one.command("c1", "Deposit", {"id": "a", "amount": 1}, until="PROJECTED")
                assert {(await one.receive())["type"] for _ in range(3)} == {"events", "change", "result"}
                assert (await two.ask(type="unsubscribe", id="s1"))["type"] == "unsubscribed"


class TestConnecting:
    async def test_wss(self) -> None:
        async with Server(ssl_context=server_tls()).serving() as server:
            async with open_websocket_gateway(server.url, server.app.domain, ssl_context=client_tls()) as gateway:
                assert (await gateway.send_and_wait(Deposit("a", 5))).version == 1

    async def test_over_wss_too_a_message_over_the_limit_is_told(self) -> None:
        async with Server(ssl_context=server_tls()).serving() as server, server.raw() as raw:
            with pytest.raises(ConnectionClosed) as closed:
                await raw.command("c1", "Deposit", {"id": "x" * 2**21, "amount": 5})
                await raw.receive()
            assert closed.value.reason is not None
            assert closed.value.reason.code == 1009

    async def test_the_sub_protocol_is_named(self, server: Server) -> None:
        answer = await server.refused("trio-wow.v0")
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.endswith(b"the sub-protocol must be trio-wow.v1")
        async with server.raw() as raw:
            assert raw.socket.subprotocol == "trio-wow.v1"

    async def test_slow_handshakes_hold_up_nobody_and_end(self) -> None:
        settings = WebsocketSettings(handshake_timeout=0.3)
        async with Server(ssl_context=server_tls(), settings=settings).serving() as server:
            slow = [await trio.open_tcp_stream("127.0.0.1", server.gateway.port) for _ in range(20)]
            await slow[0].send_all(b"\x16\x03\x01")
            async with server.raw() as raw:
                await raw.command("c1", "Deposit", {"id": "a", "amount": 5})
                assert (await raw.receive())["type"] == "result"
                with trio.fail_after(10):
                    for stream in slow:
                        assert await stream.receive_some(1) == b""
                        await stream.aclose()
                await until(lambda: server.gateway._streams == 1)

    @pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n", b"\xff\xff\r\n\r\n"])
    async def test_who_leaves_before_the_handshake_makes_room_at_once(self, data: bytes) -> None:
        settings = WebsocketSettings(max_connections=1, handshake_timeout=60)
        async with Server(settings=settings).serving() as server:
            async with await trio.open_tcp_stream("127.0.0.1", server.gateway.port) as stream:
                await until(lambda: server.gateway._streams == 1)
                await stream.send_all(data)
            with trio.fail_after(20):
                await until(lambda: server.gateway._streams == 0)

    async def test_what_is_no_handshake_is_refused(self, server: Server) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", server.gateway.port)
        async with stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await stream.receive_some(100)).startswith(b"HTTP/1.1 4")

    async def test_connections_are_bounded(self, caplog: pytest.LogCaptureFixture) -> None:
        settings = WebsocketSettings(max_connections=2)
        async with Server(settings=settings).serving() as server:
            async with server.raw() as raw:
                stream = await trio.open_tcp_stream("127.0.0.1", server.gateway.port)
                await until(lambda: server.gateway._streams == 2)
                third = await trio.open_tcp_stream("127.0.0.1", server.gateway.port)
                assert await third.receive_some(1) == b""
                await third.aclose()
                assert "one more was closed" in caplog.text
                await raw.command("c1", "Deposit", {"id": "a", "amount": 5})
                assert (await raw.receive())["type"] == "result"
                await stream.aclose()

    async def test_many_connections(self, server: Server) -> None:
        results = []

        async def one(number: int) -> None:
            async with open_websocket_gateway(server.url, server.app.domain) as gateway:
                results.extend([await gateway.send_and_wait(Deposit(str(number), 1)) for _ in range(3)])

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(one, number)
        assert sorted(result.version or 0 for result in results) == [1] * 100 + [2] * 100 + [3] * 100
        await until(lambda: not server.gateway.connections)

    async def test_a_port_that_is_taken_fails_the_start(self, server: Server) -> None:
        second = WebsocketGateway(server.app.domain, server.app.gateway, port=server.gateway.port)
        with pytest.raises(OSError, match="in use"):
            await Runtime([second], signals=False).serve()
        with pytest.raises(RuntimeStateError, match="listens from prepare on"):
            assert second.port

    async def test_a_gateway_serves_one_runtime_after_the_other(self) -> None:
        server = Server()
        for version in (1, 2):
            async with server.serving():
                async with open_websocket_gateway(server.url, server.app.domain) as gateway:
                    assert (await gateway.send_and_wait(Deposit("a", 1))).version == version

    async def test_a_runtime_that_may_not_have_it_leaves_it_alone(self, tmp_path: Path) -> None:
        """Every kind of component that the package has, each in a second runtime."""
        domain = Domain([Shelf, Chain, Notebook])
        watcher = Watcher()
        watcher.gate.set()
        store = SqliteStore(tmp_path / "a.db", domain.serializer)
        app = App(domain, [View(), watcher, Noting()], store=store)
        gateway = WebsocketGateway(app.domain, app.gateway, port=0, events=app.events)
        app.add_gateway(gateway)
        components = app._components()
        assert len(components) == len({type(component) for component in components}) == 8
        runtime = Runtime(components, signals=False, shutdown_quiet_period=0)
        async with app.serving(runtime):
            for component in components:
                name = getattr(component, "name", None) or type(component).__name__
                with pytest.raises(
                    RuntimeStateError, match=f"{name} belongs to another runtime until that has stopped"
                ):
                    await Runtime([component], signals=False).serve()
            url = f"ws://127.0.0.1:{gateway.port}/"
            async with open_websocket_gateway(url, app.domain) as remote:
                for stage in Stage:
                    assert (await remote.send_and_wait(Step("a"), until=stage)).stage is stage

    @pytest.mark.parametrize("name", ["max_pending", "send_timeout", "queue_bytes"])
    def test_settings_are_checked(self, name: str) -> None:
        options: Any = {name: 0}
        with pytest.raises(ValueError, match=name):
            WebsocketSettings(**options)


class TestBackPressure:
    async def test_a_full_window_stops_the_reading_of_who_fills_it(self) -> None:
        dispatch = Settings(dispatch=DispatchSettings(max_in_flight=16, workers=1))
        async with Server(dispatch=dispatch).serving() as server:
            async with server.raw() as raw:
                for number in range(40):
                    await raw.command(f"c{number}", "Wait", {"id": str(number)})
                await until(lambda: server.gate.came == 16)
                (connection,) = server.gateway._connections
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert len(connection._commands) == 17  # and the one that is being sent
                server.gate.opened.set()
                assert {(await raw.receive())["id"] for _ in range(40)} == {f"c{number}" for number in range(40)}

    async def test_a_connection_has_so_many_commands_pending_and_no_more(self) -> None:
        async with Server(settings=WebsocketSettings(max_pending=3)).serving() as server, server.raw() as raw:
            for number in range(8):
                await raw.command(f"c{number}", "Wait", {"id": str(number)})
            await until(lambda: server.gate.came == 3)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert server.gate.came == 3
            server.gate.opened.set()
            assert len([await raw.receive() for _ in range(8)]) == 8

    async def test_a_client_that_sends_and_never_reads(self, caplog: pytest.LogCaptureFixture) -> None:
        """FS-23."""
        caplog.set_level(logging.INFO, "trio_wow.adapters.websocket")
        settings = WebsocketSettings(send_timeout=1, close_timeout=0.5, queue_bytes=2**20)
        server = Server(settings=settings)
        async with server.serving(shutdown_timeout=5):
            async with open_websocket_gateway(server.url, server.app.domain) as good:
                stalled(server)
                known = set(server.gateway._connections)
                stream = await tiny_reader(server)
                await until(lambda: server.gateway.connections == 2)
                (bad,) = server.gateway._connections - known
                quiet = {"context": "bank", "aggregate": "account", "id": "quiet"}
                await stream.send_all(text_frame(json.dumps({"type": "subscribe", "id": "s", "events": quiet})))

                async def flood() -> None:
                    for number in range(1_000):
                        command = {"name": "Print", "body": {"id": "a", "letters": 16_000}}
                        await stream.send_all(
                            text_frame(json.dumps({"type": "send", "id": str(number), "command": command}))
                        )

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_until_broken, flood)
                    await until(lambda: bad.outgoing._sending and bad.outgoing._queue)
                    while server.gateway.connections == 2:
                        await good.send_and_wait(Deposit("b", 1), timeout=10)
                assert "took nothing for 1" in caplog.text
                assert bad.outgoing.most_messages <= settings.queue_messages
                assert bad.outgoing.most_bytes <= settings.queue_bytes
                assert len(server.gateway.subscriptions) == 0
                await until(lambda: not server.app.gateway.results.waiting)
                version = len(await server.streams())
                assert version >= 1
                await good.send_and_wait(Deposit("a", 1))
                assert len(await server.streams()) == version + 1
                await stream.aclose()

    async def test_a_stop_does_not_wait_for_who_never_reads(self) -> None:
        settings = WebsocketSettings(close_timeout=0.5)
        server = Server(settings=settings)
        async with server.serving(shutdown_timeout=30):
            stalled(server)
            stream = await tiny_reader(server)
            for number in range(20):
                command = {"name": "Print", "body": {"id": "a", "letters": 100_000}}
                await stream.send_all(text_frame(json.dumps({"type": "send", "id": str(number), "command": command})))
            await until(lambda: len(server.gateway._connections) == 1)
            (connection,) = server.gateway._connections
            await until(lambda: connection.outgoing._sending and connection.outgoing._queue)
            before = trio.current_time()
            server.runtime.request_stop()
            await server.runtime.wait_stopped()
            assert trio.current_time() - before < 10  # not the 30 of the deadline, nor the 10 of the send timeout
        await stream.aclose()

    async def test_a_subscriber_that_does_not_keep_up_is_closed_and_holds_up_nobody(self) -> None:
        settings = WebsocketSettings(queue_messages=4, close_timeout=0.2)
        async with Server(settings=settings).serving() as server:
            stalled(server)
            stream = await tiny_reader(server)
            await stream.send_all(
                text_frame('{"type":"subscribe","id":"s","events":{"context":"bank","aggregate":"account","id":"a"}}')
            )
            await until(lambda: len(server.gateway.subscriptions) == 1)
            while server.gateway.connections:
                await server.app.gateway.send_and_wait(Print("a", 0, event=50_000), until=Stage.PROJECTED)
                await trio.sleep(0.005)
            assert not server.gateway.connections
            assert len(server.gateway.subscriptions) == 0
            await stream.aclose()

    async def test_who_pings_and_reads_no_pong_is_found_out(self) -> None:
        settings = WebsocketSettings(heartbeat=0.1, send_timeout=0.3)
        async with Server(settings=settings).serving() as server:
            stalled(server)
            stream = await tiny_reader(server)
            await until(lambda: server.gateway.connections == 1)
            ping = b"\x89" + bytes([0x80 | 125]) + b"\0\0\0\0" + b"p" * 125

            async def flood() -> None:
                while True:
                    await stream.send_all(ping * 100)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_broken, flood)
                with trio.fail_after(20):
                    await until(lambda: not server.gateway.connections)
            await stream.aclose()

    async def test_silence_is_broken_by_a_pong(self) -> None:
        async with Server(settings=WebsocketSettings(heartbeat=0.05)).serving() as server:
            stream = await tiny_reader(server)
            assert await stream.receive_some(2) == b"\x8a\x00"
            await stream.aclose()


async def _until_broken(function: Any) -> None:
    with suppress(trio.BrokenResourceError):
        await function()


class TestLeaving:
    async def test_a_client_leaves_while_its_command_is_decided(self, server: Server) -> None:
        """FS-24 (a)."""
        async with server.raw() as raw:
            await raw.command("c1", "Wait", {"id": "a"})
            await raw.ask(type="subscribe", id="s1", projection="Balances")
            await until(lambda: server.gate.came == 1)
        await until(lambda: not server.gateway.connections)
        assert (server.app.gateway.results.waiting, len(server.gateway.subscriptions)) == (0, 0)
        assert await server.streams() == []
        server.gate.opened.set()
        result = await server.app.gateway.send_and_wait(Deposit("a", 1))
        assert result.version == 2

    async def test_a_client_vanishes(self, server: Server) -> None:
        stream = await tiny_reader(server)
        await stream.send_all(text_frame('{"type":"send","id":"c","command":{"name":"Wait","body":{"id":"a"}}}'))
        await until(lambda: server.gate.came == 1)
        linger = b"\1\0\0\0\0\0\0\0"
        stream.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, linger)  # a reset instead of an end
        await stream.aclose()
        await until(lambda: not server.gateway.connections)
        server.gate.opened.set()
        assert (await server.app.gateway.send_and_wait(Deposit("a", 1))).version == 2


class TestStop:
    async def test_idle_connections_are_closed_with_1001_and_new_ones_refused(self) -> None:
        """FS-13, its row of idle connections."""
        server = Server()
        async with server.serving(shutdown_timeout=10, shutdown_quiet_period=0.2), trio.open_nursery() as nursery:
            nursery.cancel_scope.shield = False
            async with server.raw() as idle, server.raw() as busy:
                await busy.command("c1", "Wait", {"id": "a"})
                await until(lambda: server.gate.came == 1)
                port = server.gateway.port
                server.runtime.request_stop()
                await busy.command("c2", "Deposit", {"id": "b", "amount": 1})
                assert (await busy.receive())["error"]["code"] == "AdmissionClosedError"
                with pytest.raises(OSError, match="."):
                    await trio.open_tcp_stream("127.0.0.1", port)
                server.gate.opened.set()
                assert (await busy.receive())["result"]["version"] == 1  # what was taken is finished and told
                for raw in (idle, busy):
                    with pytest.raises(ConnectionClosed) as closed:
                        await raw.receive()
                    assert closed.value.reason is not None
                    assert closed.value.reason.code == 1001
            await server.runtime.wait_stopped()

    async def test_until_commands_are_taken_clients_are_refused_with_503(self) -> None:
        server = Server()
        ready = trio.Event()

        class CatchingUp:
            name = "slow"

            async def prepare(self, context: Any, /) -> None: ...
            def start(self) -> None: ...
            async def caught_up(self) -> None:
                await ready.wait()

            def quiesce(self) -> None: ...
            async def stop(self) -> None: ...
            def force_stop(self) -> None: ...

        server.app.add_gateway(CatchingUp())
        async with trio.open_nursery() as nursery:
            runtime = server.app.runtime(signals=False, shutdown_quiet_period=0)
            nursery.start_soon(runtime.serve)
            await until(lambda: server.gateway._listeners)
            assert (await server.refused()).startswith(b"HTTP/1.1 503")
            ready.set()
            await until(lambda: server.app.gateway._admission and server.app.gateway._admission.intake_is_open)
            async with server.raw():
                pass
            runtime.request_stop()

    async def test_who_shakes_hands_at_the_stop_is_refused_and_holds_up_nobody(self) -> None:
        """FS-13: also while the stop waits for somebody who does not answer the closing handshake."""
        asked, answer = trio.Event(), trio.Event()

        async def authenticate(handshake: Handshake) -> Identity:
            if handshake.header("x-slow"):
                asked.set()
                await answer.wait()
            return Identity()

        server = Server(authenticate=authenticate, settings=WebsocketSettings(close_timeout=0.5))
        async with server.serving(shutdown_timeout=60), trio.open_nursery() as nursery:
            silent = await tiny_reader(server)
            await until(lambda: server.gateway.connections == 1)

            async def late() -> None:
                with pytest.raises(ConnectionRefusedByServerError) as refused:
                    async with open_websocket_gateway(server.url, server.app.domain, headers={"x-slow": "1"}):
                        pass
                assert refused.value.status == 503

            nursery.start_soon(late)
            await asked.wait()
            (connection,) = server.gateway._connections
            server.runtime.request_stop()
            await until(lambda: connection._closing)
            answer.set()
            with trio.fail_after(30):
                await server.runtime.wait_stopped()
            await silent.aclose()

    async def test_whose_handshake_ends_in_the_stop_is_told_1001(self) -> None:
        server = Server()
        async with server.serving(shutdown_timeout=60):
            await server.app.gateway.send(Wait("a"))  # keeps the runtime from being quiet
            accept = WebSocketRequest.accept

            async def stop_and_accept(*args: Any, **options: Any) -> Any:
                server.runtime.request_stop()
                return await accept(*args, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(WebSocketRequest, "accept", stop_and_accept)
                async with server.raw() as raw:
                    with pytest.raises(ConnectionClosed) as closed:
                        await raw.receive()
            assert closed.value.reason is not None
            assert closed.value.reason.code == 1001

    async def test_a_ping_during_the_closing_handshake_does_not_break_it_off(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = Server(settings=WebsocketSettings(close_timeout=20))
        async with server.serving(shutdown_timeout=60):
            stream = await tiny_reader(server)
            await until(lambda: server.gateway.connections == 1)
            server.runtime.request_stop()
            answer = await stream.receive_some(2)
            await stream.send_all(b"\x89\x80\0\0\0\0" * 100)
            await stream.send_all(b"\x88\x82\0\0\0\0\x03\xe9")
            await stream.send_eof()
            while part := await stream.receive_some(1_000):  # ends with an end, not with a reset
                answer += part
            await stream.aclose()
            with trio.fail_after(10):
                await server.runtime.wait_stopped()
        assert answer == b"\x88\x18\x03\xe9the server is stopping"
        assert "failed" not in caplog.text

    async def test_a_forced_stop_leaves_no_connection(self) -> None:
        server = Server()
        with pytest.raises(BaseExceptionGroup) as raised:
            async with server.serving(shutdown_timeout=30):
                async with server.raw() as raw:
                    await raw.command("c1", "Wait", {"id": "a"})
                    await until(lambda: server.gate.came == 1)
                    server.runtime.force_stop()
                    with pytest.raises(ConnectionClosed):
                        await raw.receive()
        assert "ShutdownDeadlineError" in repr(raised.value)
        assert not server.gateway.connections


class TestClient:
    async def test_its_calls_are_those_of_the_local_gateway(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, server.app.domain) as gateway:
            sent = await gateway.send(Deposit("a", 5), request_id="r1")
            assert (sent.stage, sent.request_id, sent.version) == (Stage.SENT, "r1", None)
            result = await gateway.send_and_wait(Deposit("a", 6), until=Stage.PROJECTED, expected_version=1)
            assert (result.stage, result.version, result.value) == (Stage.PROJECTED, 2, 11)
            async with gateway.stream(Deposit("a", 7), until=Stage.PROJECTED) as signals:
                stages = [signal.stage async for signal in signals]
            assert stages == [Stage.SENT, Stage.PROCESSED, Stage.PROJECTED]
            again = await gateway.send_and_wait(Deposit("a", 5), request_id="r1")
            assert again.error is not None
            assert (again.error.code, again.version) == ("DuplicateRequestIdError", 1)
            wrong = await gateway.send_and_wait(Deposit("a", 5), expected_version=1, tenant="(0)", headers={"a": "b"})
            assert wrong.error is not None
            assert wrong.error.code == "ExpectedVersionError"
            assert not gateway._exchanges

    async def test_its_errors_are_those_of_the_local_gateway(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, server.app.domain) as gateway:
            with pytest.raises(InvalidCommandError):
                await gateway.send(Shout("a"))
            with pytest.raises(StageUnavailableError):
                await gateway.send_and_wait(Deposit("a", 1), until=Stage.SAGA_HANDLED)
            with pytest.raises(StageUnavailableError):
                async with gateway.stream(Deposit("a", 1), until=Stage.SAGA_HANDLED):
                    raise AssertionError("entered")
            with pytest.raises(ValueError, match="timeout"):
                await gateway.send_and_wait(Deposit("a", 1), timeout=0)
            with pytest.raises(TypeError, match="Stage"):
                await gateway.send_and_wait(Deposit("a", 1), until="PROCESSED")  # type: ignore[arg-type]
            with pytest.raises(RemoteError, match="MessageTooLargeError"):
                await gateway.send(Note("n", "x" * 2**20))
            with pytest.raises(RemoteError, match="MessageTooLargeError: the command has reached PROCESSED"):
                await gateway.send_and_wait(Print("a", 2**20))
            assert not gateway._exchanges

    async def test_a_class_that_the_server_has_not(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, Domain([Shelf])) as gateway:
            with pytest.raises(RemoteError, match="UnknownMessageTypeError.*command.name") as raised:
                await gateway.send(Put("s"))
        assert (raised.value.code, raised.value.field) == ("UnknownMessageTypeError", "command.name")

    async def test_a_wait_that_ends_early_is_taken_back(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, server.app.domain) as gateway:
            with pytest.raises(WaitTimeoutError) as raised:
                await gateway.send_and_wait(Wait("a"), timeout=0.2)
            assert raised.value.reached == "SENT"
            async with gateway.stream(Wait("b"), timeout=60) as signals:
                assert (await anext(signals)).stage is Stage.SENT
            await until(lambda: not server.app.gateway.results.waiting)

    async def test_a_lost_connection_ends_its_waits(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, server.app.domain) as gateway:
            async with gateway.stream(Wait("a"), request_id="r1") as signals:
                assert (await anext(signals)).stage is Stage.SENT
                for connection in server.gateway._connections:
                    connection.close(1001, "enough")
                with pytest.raises(ConnectionLostError, match="1001.*'r1'") as raised:
                    await anext(signals)
            assert (raised.value.reached, raised.value.request_id) == ("SENT", "r1")
            with pytest.raises(ConnectionLostError) as raised:
                await gateway.send(Deposit("a", 1))
            assert raised.value.reached is None

    async def test_nobody_listens(self, server: Server) -> None:
        with pytest.raises(ConnectionRefusedByServerError, match="cannot be connected to") as raised:
            async with open_websocket_gateway("ws://127.0.0.1:1/", server.app.domain):
                pass
        assert raised.value.status is None

    async def test_a_host_whose_name_is_none(self, server: Server) -> None:
        with pytest.raises(ConnectionRefusedByServerError, match="cannot be connected to: Unicode"):
            async with open_websocket_gateway(f"ws://{'a' * 70}/", server.app.domain):
                pass

    async def test_who_does_not_answer_is_not_waited_for(self, server: Server) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener:
            url = f"ws://127.0.0.1:{listener.socket.getsockname()[1]}/"
            settings = WebsocketSettings(handshake_timeout=0.1)
            with pytest.raises(ConnectionRefusedByServerError, match=r"no answer within 0.1 s"):
                async with open_websocket_gateway(url, server.app.domain, settings=settings):
                    pass

    async def test_who_is_not_trusted_is_told_nothing(self) -> None:
        async with Server(ssl_context=server_tls()).serving() as server:
            with pytest.raises(ConnectionRefusedByServerError):
                async with open_websocket_gateway(server.url, server.app.domain):
                    pass

    @pytest.mark.parametrize(
        "url",
        [
            "http://localhost/",
            "ws:///",
            "localhost",
            "ws://localhost:99999/",
            "ws://localhost:x/",
            "ws://[::1/",
            "ws://x:0/",
        ],
    )
    async def test_what_is_no_url_of_a_websocket(self, url: str) -> None:
        assert not is_websocket_url(url)
        with pytest.raises(ValueError, match="url must be like"):
            async with open_websocket_gateway(url, Server().app.domain):
                pass

    @pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
    async def test_what_the_block_raises_is_raised_as_it_is(self, server: Server, kind: type[BaseException]) -> None:
        with pytest.raises(kind):
            async with open_websocket_gateway(server.url, server.app.domain):
                raise kind

    async def test_what_the_block_raises_is_not_lost_when_it_is_cancelled_as_well(self, server: Server) -> None:
        with pytest.RaisesGroup(ZeroDivisionError), trio.CancelScope() as scope:
            async with open_websocket_gateway(server.url, server.app.domain):
                scope.cancel()
                raise ZeroDivisionError

    async def test_who_is_one_too_many_does_not_wait_for_an_answer(self) -> None:
        settings = WebsocketSettings(max_connections=1, handshake_timeout=60)
        async with Server(settings=settings).serving() as server, server.raw():
            with trio.fail_after(20), pytest.raises(ConnectionRefusedByServerError, match="closed without"):
                async with open_websocket_gateway(server.url, server.app.domain, settings=settings):
                    pass

    @pytest.mark.parametrize("subprotocol", [None, "trio-wow.v0"])
    async def test_who_speaks_another_protocol_is_left(self, subprotocol: str | None) -> None:
        async with pretender(lambda _: trio.Event().wait(), subprotocol) as url:
            with pytest.raises(ConnectionRefusedByServerError, match=r"nobody there speaks trio-wow\.v1"):
                async with open_websocket_gateway(url, Domain([Shelf])):
                    raise AssertionError("entered")

    async def test_pings_during_the_closing_handshake_harm_nobody(self) -> None:
        closing = trio.Event()

        async def ping_until_left(stream: trio.SocketStream) -> None:
            assert (await stream.receive_some(1)) == b"\x88"
            while True:
                await stream.send_all(b"\x89\0" * 100)
                closing.set()
                await stream.receive_some(1_000)

        settings = WebsocketSettings(close_timeout=0.2)
        async with pretender(ping_until_left) as url:
            async with open_websocket_gateway(url, Domain([Shelf]), settings=settings):
                pass
        assert closing.is_set()

    async def test_a_lost_connection_ends_the_calls_that_wait_to_send(self) -> None:
        stop = trio.Event()
        settings = WebsocketSettings(queue_messages=4, close_timeout=0.2)
        lost: list[object] = []
        async with pretender(lambda _: stop.wait()) as url:
            async with open_websocket_gateway(url, Server().app.domain, settings=settings) as gateway:

                async def send() -> None:
                    with pytest.raises(ConnectionLostError) as raised:
                        await gateway.send(Note("n", "x" * 900_000))
                    lost.append(raised.value.reached)

                with trio.fail_after(30):
                    async with trio.open_nursery() as nursery:
                        for _ in range(20):
                            nursery.start_soon(send)
                        await until(lambda: gateway._outgoing._sending and gateway._outgoing._putting.locked())
                        stop.set()
        assert {"SENT", None} == set(lost)
        assert len(lost) == 20

    async def test_what_came_in_time_can_still_be_read(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, server.app.domain) as gateway:
            async with gateway.stream(Deposit("a", 1), until=Stage.PROJECTED, timeout=5) as signals:
                (exchange,) = gateway._exchanges.values()
                await until(lambda: exchange.is_over)
                exchange.deadline = trio.current_time() - 1
                assert [signal.stage async for signal in signals][-1] is Stage.PROJECTED

    async def test_any_number_may_be_a_timeout(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, server.app.domain) as gateway:
            assert (await gateway.send_and_wait(Deposit("a", 1), timeout=10**30)).version == 1

    async def test_a_server_that_speaks_something_else_is_left(self, server: Server) -> None:
        async with open_websocket_gateway(server.url, server.app.domain) as gateway:
            async with gateway.stream(Wait("a")) as signals:
                await anext(signals)
                (connection,) = server.gateway._connections
                connection.outgoing.offer(b"[]")
                with pytest.raises(ConnectionLostError, match="no frame"):
                    await anext(signals)

    async def test_after_the_stop_request_it_is_refused(self) -> None:
        server = Server()
        async with server.serving(shutdown_quiet_period=0.1):
            async with open_websocket_gateway(server.url, server.app.domain) as gateway:
                await gateway.send(Wait("a"))
                await until(lambda: server.gate.came == 1)
                server.runtime.request_stop()
                with pytest.raises(AdmissionClosedError):
                    await gateway.send(Deposit("a", 1))
                server.gate.opened.set()
