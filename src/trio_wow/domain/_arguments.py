"""What a message function gets besides its message."""

from collections.abc import Mapping, Sequence
from typing import Any

from trio_wow.domain._functions import Parameter, Source

__all__ = ["Arguments", "checked_services"]


class Arguments:
    """Finds the arguments for what one message function takes besides its message, by their annotations.

    Args:
        where: the class and the method, for problems.
        parameters: what it takes.
        services: what the application has registered, by class.
        problems: gets a sentence for each parameter that nothing is found for.
        transaction_type: the class of the store's transactions, if it has some.

    Attributes:
        transaction: the parameter that takes the store's transaction, if there is one.
        states: the classes of the parameters that take the state of its aggregate, by their names.
        needs_state: whether there are some.
    """

    def __init__(
        self,
        where: str,
        parameters: Sequence[Parameter],
        services: Mapping[type, object],
        problems: list[str],
        *,
        transaction_type: type | None = None,
    ) -> None:
        self.transaction: str | None = None
        self.states: dict[str, type] = {
            each.name: each.annotation for each in parameters if each.source is Source.STATE
        }
        self.needs_state = bool(self.states)
        self._services: dict[str, object] = {}
        self._others = [(each.name, each.source) for each in parameters if each.source is not Source.SERVICE]
        for parameter in parameters:
            if parameter.source is not Source.SERVICE:
                continue
            if parameter.annotation in services:
                self._services[parameter.name] = services[parameter.annotation]
            elif parameter.annotation is transaction_type:
                self.transaction = parameter.name
            elif not parameter.is_optional:
                name = parameter.annotation.__name__
                problems.append(
                    f"{where} takes {parameter.name}: {name}, which is neither a registered service nor the store's "
                    f"transaction; give the App services={{{name}: ...}}, or a store that has such transactions"
                )

    def __bool__(self) -> bool:
        return bool(self._services or self._others)

    def of(self, envelope: Any, state: object = None) -> dict[str, object]:
        """Return the arguments for one message.

        Args:
            envelope: the command, the event, or the state event.
            state: of its aggregate, where `needs_state` says so.
        """
        arguments = dict(self._services)
        for name, source in self._others:
            if source is Source.HEADERS:
                arguments[name] = envelope.headers
            elif source is Source.STREAM:
                arguments[name] = envelope.stream
            else:
                arguments[name] = envelope if source is Source.ENVELOPE else state
        return arguments


def checked_services(services: Mapping[type, object] | None) -> Mapping[type, object]:
    """Return the services of an application.

    Raises:
        TypeError: they are no mapping of classes to what is given for them.
    """
    checked: dict[Any, object] = dict(services or {})
    if wrong := [key for key in checked if not isinstance(key, type)]:
        raise TypeError(f"services map a class to what a parameter with this annotation gets; {wrong[0]!r} is no class")
    return checked
