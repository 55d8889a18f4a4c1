"""The way in: sending commands from outside, and waiting for what becomes of them."""

from trio_wow.gateway._gateway import CommandGateway as CommandGateway

__all__ = ["CommandGateway"]
