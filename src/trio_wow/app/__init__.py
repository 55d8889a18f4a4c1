"""Puts the rooms together: one object from aggregates and processors."""

from trio_wow.app._app import App as App

__all__ = ["App"]
