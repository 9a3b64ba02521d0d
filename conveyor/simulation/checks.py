"""Checks the numbers and words of a simulation. Each failure is a ValueError of one sentence that
names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

NEVER = 1e9
"""Seconds that no simulation reaches; all times stay below it, so that clocks can represent
them."""
INSTANT = 1e-3
"""The shortest interval of repeated actions: with a shorter one, time would stand still."""


def check_count(field: str, value: object, *, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless a field is a whole number within its bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not _within(value, least, most):
        upper = "up" if most is None else f"to {most:,}"
        raise _refused(field, f"a whole number from {least:,} {upper}", value)


def check_number(field: str, value: object, *, least: float = 0.0, most: float) -> None:
    """Raise ValueError unless a field is a finite number within its bounds."""
    if not _is_number(value) or not _within(value, least, most):
        raise _refused(field, f"a number from {least:g} to {most:g}", value)


def check_time(field: str, value: object, *, least: float = 0.0) -> None:
    """Raise ValueError unless a field is a number of seconds, `least` or more."""
    if not _is_number(value) or not _within(value, least, NEVER):
        raise _refused(field, f"a number of seconds from {least:g} to {NEVER:g}", value)


def check_word(field: str, value: object, known: Sequence[str]) -> None:
    """Raise ValueError unless a field is one of the known words."""
    if value not in known:
        raise _refused(field, f"one of {', '.join(known)}", value)


def check_kind(field: str, value: object, kinds: type | tuple[type, ...], words: str) -> None:
    """Raise ValueError unless a field is of a kind; `words` name the kind with its article."""
    if not isinstance(value, kinds):
        raise _refused(field, words, value)


def check_place(field: str, value: int, *, among: int, noun: str) -> None:
    """Raise ValueError unless a field is the number, from 0, of one of `among` things."""
    if value >= among:
        have = f"there is 1 {noun}" if among == 1 else f"there are {among:,} {noun}s"
        raise ValueError(f"{field} counts from 0 and {have}, so it cannot be {value:,}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(value: float, least: float, most: float | None) -> bool:
    return least <= value and (most is None or value <= most)


def _refused(field: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"{field} must be {wanted}, not {value!r:.60}")
