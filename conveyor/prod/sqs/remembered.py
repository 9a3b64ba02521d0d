"""What a process remembers of many queues: the latest used, so that memory stays bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MOST = 10_000
"""Names remembered at a time."""

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """Values by name. One that was not used for long may be forgotten, so it must be findable
    again."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._values: OrderedDict[str, Value] = OrderedDict()

    def get(self, name: str) -> Value | None:
        """The value of a name, None where it is not known (any more)."""
        value = self._values.get(name)
        if value is not None:
            self._values.move_to_end(name)
        return value

    def put(self, name: str, value: Value) -> None:
        """Remember a value."""
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        """Let go of a name, where it is known."""
        self._values.pop(name, None)
