"""Where a runtime is in its life, and what it says of itself when asked."""

import enum

from attrs import frozen

__all__ = ["ComponentStatistics", "LeaseStatistics", "RuntimeState", "RuntimeStatistics"]


class RuntimeState(enum.Enum):
    """Where a runtime is in its one life; it only ever moves forward, and may skip states."""

    NEW = 0
    """Nothing has been called. No task exists."""
    STARTING = 1
    """Components are being prepared and started, in order. Nothing is taken from outside."""
    RUNNING = 2
    """Every component has started and has caught up. Work from outside is taken."""
    STOPPING = 3
    """The deadline runs. Nothing more is taken from outside; what was taken is being finished."""
    FORCE_STOPPING = 4
    """The deadline has passed or a force was asked for. What still runs is being cancelled."""
    STOPPED = 5
    """No task is left."""


@frozen
class LeaseStatistics:
    """One operation that runs.

    Attributes:
        name: what it was called when it began; a message's tells the class of its body and the aggregate ID.
        age: seconds since it began, on Trio's clock.
    """

    name: str
    age: float


@frozen
class ComponentStatistics:
    """One component.

    Attributes:
        name: its own, or its class's.
        step: the step of it that is being waited for: `prepare`, `caught_up` or `stop`; `None` between them.
        left: whether none of its tasks is left, and none can come any more.
        tasks: names of the tasks that it has now, each before those that run inside it.
    """

    name: str
    step: str | None
    left: bool
    tasks: tuple[str, ...]


@frozen
class RuntimeStatistics:
    """One moment of a runtime, taken in one step of the event loop.

    Attributes:
        state: where it is in its life.
        seconds_left: until its deadline; 0 once the stop is forced; `None` before a stop and after it.
        leases: the operations that run now, oldest first.
        components: in the order in which they start.
    """

    state: RuntimeState
    seconds_left: float | None
    leases: tuple[LeaseStatistics, ...]
    components: tuple[ComponentStatistics, ...]
