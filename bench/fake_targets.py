"""Targets for the in-process fake gateway, which reads its answer from the URL's query."""

from __future__ import annotations

ORIGIN = "http://fake.test"


def small(number: int) -> str:
    """Return a page of some fifty bytes, answered at once."""
    return f"{ORIGIN}/page/{number}"


def missing(number: int) -> str:
    """Return a 404, answered at once: the task fails for good."""
    return f"{ORIGIN}/page/{number}?status=404"


def failing(number: int) -> str:
    """Return a 404 with one of fifty kinds of detail, no two of which are the same text."""
    kind = "".join(chr(ord("a") + int(digit)) for digit in str(number % 50))
    return f"{ORIGIN}/page/{number}?status=404&detail=no+{kind}+after+{number}+ms"


def delayed(number: int, seconds: float) -> str:
    """Return a page that takes `seconds`."""
    return f"{ORIGIN}/page/{number}?delay={seconds:.3f}"


def endless(number: int) -> str:
    """Return a target that does not answer before the gateway's own timeout."""
    return f"{ORIGIN}/page/{number}?hang=1"
