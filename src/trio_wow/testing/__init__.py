"""Tools for testing code that uses trio-wow. Needs no test framework."""

from trio_wow.testing._given import AggregateCase as AggregateCase
from trio_wow.testing._given import given as given

__all__ = ["AggregateCase", "given"]
