"""What a runtime is made of."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import trio
from attrs import field, frozen

from trio_wow.execution import KeyedExecutor
from trio_wow.runtime._admission import ActivityLease, Admission

__all__ = ["RuntimeComponent", "RuntimeContext"]


def _open_admission() -> Admission:
    admission = Admission()
    admission.open_intake()
    return admission


@frozen
class RuntimeContext:
    """What a runtime lends to one component, from `prepare` until the component has stopped.

    A test may make one without a runtime, in a nursery of its own: prepare and start the component, and later await its
    `stop()`. Nothing sets `stop_requested` or closes the doors then but the test itself.

    Attributes:
        nursery: the component's own. What fails in it ends the component and, with it, the runtime.
        executor: the runtime's one executor; without a runtime `KeyedExecutor.shared()`.
        stop_requested: set when the stop is requested. A source of work from outside then takes nothing more.
        admission: the runtime's doors; a bus receiver and a gateway need more of them than `try_acquire`. Without a
            runtime, doors of its own, which are open.
    """

    nursery: trio.Nursery
    executor: KeyedExecutor = field(factory=KeyedExecutor.shared)
    stop_requested: trio.Event = field(factory=trio.Event)
    admission: Admission = field(factory=_open_admission)
    _report: Callable[[BaseException], object] | None = None

    def try_acquire(self, name: str | None = None, *parts: object) -> ActivityLease | None:
        """Give a lease for one complete operation, or `None` once admission has closed; see `Admission.try_acquire`."""
        return self.admission.try_acquire(name, *parts)

    def report_failure(self, error: BaseException) -> None:
        """Say that the component cannot go on. Fatal: the runtime stops and `serve` raises `error`.

        Without a runtime the nursery is cancelled and raises `error`, once more if the component's task raises it too.
        """
        if self._report is not None:
            self._report(error)
            return

        async def fail() -> None:
            raise error

        self.nursery.start_soon(fail, name="reported failure")


@runtime_checkable
class RuntimeComponent(Protocol):
    """A part with a life of its own, prepared, started and stopped by a `Runtime`. Nothing to inherit.

    It belongs to one runtime at a time, for as long as that serves: another one that has it refuses to serve, and calls
    none of its components. So whoever stops a component has prepared it, even if `prepare` failed half-way.

    A component may also have `async caught_up()`: after `start`, the runtime opens its intake only when this returns.
    """

    async def prepare(self, context: RuntimeContext, /) -> None:
        """Subscribe and open what is needed; process nothing yet. Before this call a component does nothing.

        May be cancelled when a stop is requested during the start; `stop` is called then, as after a failure.
        """
        ...

    def start(self) -> None:
        """Begin to process, in tasks of the context's nursery. Every component of the runtime is prepared by now."""
        ...

    def quiesce(self) -> None:
        """Take nothing more; what was taken goes on. Prompt, idempotent, safe before `prepare`."""
        ...

    async def stop(self) -> None:
        """Wait until all that was taken has finished, then release what is held.

        The component's own tasks end by the time this returns, for which it may cancel its nursery; the stop of the
        runtime waits for one that goes on.

        Cancellation: the deadline has passed; `force_stop` follows.
        """
        ...

    def force_stop(self) -> None:
        """Give up what is still running; the component's tasks are cancelled next. Prompt, idempotent, safe always."""
        ...
