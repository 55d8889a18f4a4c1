"""Waiting for stages: who signals which, in which order, and what becomes of the wait when a signal does not come."""

from typing import Any

import trio
from chain_domain import Chain, Stepped, Twice

from trio_wow import (
    App,
    Stage,
    on_event,
    projection,
)
from trio_wow.runtime import Runtime

AFTER = (Stage.SNAPSHOT, Stage.PROJECTED, Stage.EVENT_HANDLED, Stage.SAGA_HANDLED)


def quick(app: App, **options: Any) -> Runtime:
    return app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})


@projection
class View:
    """Handles steps, each after its gate (if it has one) was opened."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.gates: dict[int, trio.Event] = {}
        self.error: Exception | None = None

    @on_event
    async def stepped(self, event: Stepped) -> None:
        if gate := self.gates.get(event.number):
            await gate.wait()
        if self.error is not None:
            raise self.error
        self.seen.append(event.number)


async def test_projected_says_that_the_view_shows_it() -> None:
    view = View()
    app = App([Chain], [view])
    async with app.serving(quick(app)) as gateway:
        result = await gateway.send_and_wait(Twice("a"), until=Stage.PROJECTED)
        assert (result.stage, result.version, result.error) == (Stage.PROJECTED, 1, None)
        assert view.seen == [100, 101]
        assert not gateway.results.waiting
