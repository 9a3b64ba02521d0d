"""Attribute values: plain ones here, tagged ones on the wire.

Numbers travel as text and come back as they were: a whole number as int, any other as float. What
no condition looks at is kept as one JSON text, which costs a fraction of a map of attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Plain = str | int | float | bool | bytes | None | list[Any] | dict[str, Any]
Tagged = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Name:
    """In the place of a value: the attribute that a placeholder of another name stands for."""

    attribute: str


Given = Plain | Name
"""What a placeholder of an expression stands for: `:one` for a value, `#one` for a name."""


def tag(value: Plain) -> Tagged:
    """A plain value as DynamoDB takes it. Raises TypeError for any other."""
    if isinstance(value, str):
        return {"S": value}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int):
        return {"N": repr(value)}
    if isinstance(value, float):
        return {"N": _digits(value)}
    if isinstance(value, bytes):
        return {"B": value}
    if value is None:
        return {"NULL": True}
    if isinstance(value, list):
        return {"L": [tag(one) for one in value]}
    if isinstance(value, dict):
        return {"M": tag_all(value)}
    raise TypeError(f"no attribute value: {type(value).__name__}")


def tag_all(values: Mapping[str, Plain]) -> dict[str, Tagged]:
    """Plain values by name, as an item or as the values of an expression."""
    return {name: tag(value) for name, value in values.items()}


def untag(value: Tagged) -> Any:
    """The plain value of a tagged one."""
    [(kind, content)] = value.items()
    if kind == "N":
        return _number(content)
    if kind == "M":
        return untag_all(content)
    if kind == "L":
        return [untag(one) for one in content]
    return None if kind == "NULL" else content


def untag_all(item: Mapping[str, Tagged]) -> dict[str, Any]:
    """A whole item."""
    return {name: untag(value) for name, value in item.items()}


def _digits(value: float) -> str:
    """A number as the table itself writes it, so that a call and its repetition stay the same."""
    return f"{Decimal(repr(value)).normalize() + 0:f}"


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
