"""The second scheduling strategy, as dispatchers use it."""

from trio_wow.execution import (
    AggregateSchedulerStatistics,
    AggregateSchedulerSupplier,
    BorrowedAggregateSchedulerSupplier,
    group_key,
)
from trio_wow.messages import AggregateId
from trio_wow.runtime import RuntimeContext

__all__ = ["GroupedScheduling", "Groups"]

GROUPS_PER_WORKER = 64


class Groups:
    """The groups of one dispatcher, and the schedulers on which they run.

    Attributes:
        schedulers: one for each named aggregate, by its name such as `fleet.aircraft`.
    """

    def __init__(
        self, name: str, schedulers: AggregateSchedulerSupplier | BorrowedAggregateSchedulerSupplier, count: int
    ) -> None:
        self.schedulers = schedulers
        self._name = name
        self._count = count

    def of(self, aggregate_id: AggregateId) -> str:
        """Name the group of an ID."""
        group = group_key(aggregate_id.id, self._count)
        return f"{self._name}-{aggregate_id.context}.{aggregate_id.aggregate}/{group}"

    def lent(self) -> "Groups":
        """Return the same for a dispatcher that this one is made of, which must not stop the schedulers."""
        return Groups(self._name, BorrowedAggregateSchedulerSupplier(self.schedulers), self._count)


class GroupedScheduling:
    """The other scheduling strategy: a fixed number of serial groups, instead of a mailbox for each aggregate ID.

    Given to dispatchers or an `App`. Each dispatcher then has an `AggregateSchedulerSupplier` with its name, and a
    receiver with a window of its own for each of its named aggregates. IDs that share a group wait for one another;
    see `docs/scheduling.md`.

    Args:
        groups: of each dispatcher and named aggregate; a positive int, or `None` for 64 for each worker of the runtime.
        parallelism: how many groups of one dispatcher and named aggregate compute at once; a positive int, or `None`
            for as many as the runtime has workers.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, *, groups: int | None = None, parallelism: int | None = None) -> None:
        for argument, value in (("groups", groups), ("parallelism", parallelism)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{argument} must be a positive int, not {value!r}")
        self._groups = groups
        self._parallelism = parallelism
        self._suppliers: list[AggregateSchedulerSupplier] = []

    def statistics(self) -> tuple[AggregateSchedulerStatistics, ...]:
        """Return what each scheduler does at this moment, over all dispatchers that run."""
        return tuple(each for supplier in self._suppliers if not supplier.is_closed for each in supplier.statistics())

    def groups_for(self, name: str, context: RuntimeContext) -> Groups:
        """Return new groups for a dispatcher, which stops their schedulers."""
        self._suppliers = [supplier for supplier in self._suppliers if not supplier.is_closed]
        supplier = AggregateSchedulerSupplier(name, self._parallelism, nursery=context.nursery, like=context.executor)
        self._suppliers.append(supplier)
        count = self._groups or GROUPS_PER_WORKER * len(context.executor.statistics().workers)
        return Groups(name, supplier, count)
