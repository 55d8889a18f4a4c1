"""The frames of docs/websocket.md are those that are sent."""

import json
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import trio
from websocket_support import Account, Balances, Deposit, Gate, Server, client_tls, server_tls

from trio_wow import App, Stage
from trio_wow.adapters.websocket import ProjectionChanges, WebsocketGateway, open_websocket_gateway

PAGE = (Path(__file__).parents[1] / "docs/websocket.md").read_text()
FRAMES = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
SERVING, CLIENT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def matches(shown: Any, got: Any) -> bool:
    if isinstance(shown, dict) and isinstance(got, dict):
        return shown.keys() == got.keys() and all(matches(shown[name], got[name]) for name in shown)
    return bool(shown == got or (shown == "…" and isinstance(got, str) and got))


async def test_the_frames() -> None:
    async with Server().serving() as server, server.raw() as raw:
        for line in "".join(FRAMES).splitlines():
            frame = json.loads(line[2:])
            if line.startswith(">"):
                await raw.send(**frame)
            else:
                with trio.fail_after(10):
                    got = await raw.receive()
                assert matches(frame, got), got


async def test_the_programs() -> None:
    scope: dict[str, Any] = {
        "App": partial(App, services={Gate: Gate()}),
        "Account": Account,
        "Balances": Balances,
        "ProjectionChanges": ProjectionChanges,
        "WebsocketGateway": WebsocketGateway,
    }
    exec(SERVING.replace("trio.run(app.runtime().serve)", "").replace("8080", "0"), scope)
    assert scope["app"].runtime()
    async with Server(ssl_context=server_tls()).serving() as server:
        scope = {"app": server.app, "trust": client_tls(), "Deposit": Deposit, "Stage": Stage}
        scope["open_websocket_gateway"] = open_websocket_gateway
        code = CLIENT.replace("8080", str(server.gateway.port))
        exec("async def client():\n" + textwrap.indent(code, "    ") + "\n    return result", scope)
        assert (await scope["client"]()).stage is Stage.PROJECTED
