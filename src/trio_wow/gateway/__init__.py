"""The way in: sending commands from outside, and waiting for what becomes of them."""

from trio_wow.gateway._gateway import CommandGateway as CommandGateway
from trio_wow.gateway._gateway import check_wait as check_wait

__all__ = ["CommandGateway", "check_wait"]
