"""Streams, snapshots, checkpoints and failures in one SQLite file."""

from trio_wow.adapters.sqlite._store import SqliteStore as SqliteStore

__all__ = ["SqliteStore"]
