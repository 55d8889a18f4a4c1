"""A gateway for clients that connect over a websocket, and the client's side of it."""

from trio_wow.adapters.websocket._client import WebsocketCommandGateway as WebsocketCommandGateway
from trio_wow.adapters.websocket._client import is_websocket_url as is_websocket_url
from trio_wow.adapters.websocket._client import open_websocket_gateway as open_websocket_gateway
from trio_wow.adapters.websocket._feed import ProjectionChanges as ProjectionChanges
from trio_wow.adapters.websocket._gateway import WebsocketGateway as WebsocketGateway
from trio_wow.adapters.websocket._protocol import SUBPROTOCOL as SUBPROTOCOL
from trio_wow.adapters.websocket._settings import Handshake as Handshake
from trio_wow.adapters.websocket._settings import Identity as Identity
from trio_wow.adapters.websocket._settings import WebsocketSettings as WebsocketSettings

__all__ = [
    "SUBPROTOCOL",
    "Handshake",
    "Identity",
    "ProjectionChanges",
    "WebsocketCommandGateway",
    "WebsocketGateway",
    "WebsocketSettings",
    "is_websocket_url",
    "open_websocket_gateway",
]
