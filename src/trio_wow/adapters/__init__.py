"""Adapters for databases and brokers, each in a room of its own. No other room imports them."""
