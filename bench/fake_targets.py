"""Targets for the in-process fake gateway, which reads how to answer from the URL's query."""

from __future__ import annotations

ORIGIN = "http://fake.test"


def small(number: int) -> str:
    """A page of some fifty bytes, answered at once."""
    return f"{ORIGIN}/page/{number}"


def missing(number: int) -> str:
    """A 404, answered at once: the task fails for good."""
    return f"{ORIGIN}/page/{number}?status=404"


def delayed(number: int, seconds: float) -> str:
    """A page that takes so many seconds."""
    return f"{ORIGIN}/page/{number}?delay={seconds:.3f}"


def endless(number: int) -> str:
    """No answer before the gateway's own timeout."""
    return f"{ORIGIN}/page/{number}?hang=1"
