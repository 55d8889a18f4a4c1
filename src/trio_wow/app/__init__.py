"""Puts the rooms together: one object from aggregates, processors and settings."""

from trio_wow.app._app import App as App
from trio_wow.app._settings import DispatchSettings as DispatchSettings
from trio_wow.app._settings import Settings as Settings
from trio_wow.app._settings import ShutdownSettings as ShutdownSettings
from trio_wow.app._settings import load_settings as load_settings

__all__ = ["App", "DispatchSettings", "Settings", "ShutdownSettings", "load_settings"]
