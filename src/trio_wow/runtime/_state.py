"""Where a runtime is in its life, and what it says of itself when asked."""

import enum

from attrs import frozen

__all__ = ["ComponentStatistics", "LeaseStatistics", "RuntimeState", "RuntimeStatistics"]


class RuntimeState(enum.Enum):
    """Where a runtime is in its one life. It only ever moves forward, and may skip states.

    `docs/lifecycle.md` has the picture.
    """

    NEW = 0
    """`serve` has not been called. No component has been called, and no task exists. A stop asked for now is
    remembered: `serve` then starts nothing, and ends."""
    STARTING = 1
    """Components are prepared, in order; when all are, they are started, in order; then those that can catch up. The
    intake is closed: nothing is taken from outside. No deadline runs."""
    RUNNING = 2
    """Every component has started and has caught up. The intake is open. No deadline runs."""
    STOPPING = 3
    """A stop was asked for, `serve` was cancelled, or a component has failed. The deadline is fixed and runs. The
    intake is closed and `stop_requested` is set; what was taken is being finished. After a failure admission is closed
    too, otherwise it closes when the runtime is quiet."""
    FORCE_STOPPING = 4
    """The deadline has passed, or a force was asked for. Both doors are closed. What still ran has been named in the
    log, has been told (`force_stop`) and is cancelled, the executor as well. Only what shields itself goes on."""
    STOPPED = 5
    """`serve` ends. No task of the runtime is left, every component that was prepared has been stopped or forced, and
    the executor is closed. Threads that a forced stop has abandoned may still run."""


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
