"""Puts the rooms together: one object from aggregates, processors and settings."""

from trio_wow.app._app import App as App
from trio_wow.app._embedding import AsyncioGuest as AsyncioGuest
from trio_wow.app._embedding import call_asyncio as call_asyncio
from trio_wow.app._embedding import serving_in_asyncio as serving_in_asyncio
from trio_wow.app._embedding import serving_in_thread as serving_in_thread
from trio_wow.app._settings import DispatchSettings as DispatchSettings
from trio_wow.app._settings import Settings as Settings
from trio_wow.app._settings import ShutdownSettings as ShutdownSettings
from trio_wow.app._settings import load_settings as load_settings

__all__ = [
    "App",
    "AsyncioGuest",
    "DispatchSettings",
    "Settings",
    "ShutdownSettings",
    "call_asyncio",
    "load_settings",
    "serving_in_asyncio",
    "serving_in_thread",
]
