"""Rows as a simulation gives them, made by hand."""

from __future__ import annotations

from typing import Any

from conveyor.simulation.view import Row

FIELDS = (
    "world",
    "policy",
    "permit_store",
    "workers",
    "cap",
    "tasks",
    "window_s",
    "completed",
    "receives",
    "amplification",
    "receive_calls_per_task",
    "empty_receives",
    "bounces",
    "permit_calls_per_task",
    "elapsed_s",
    "utilisation",
    "utilisation_steady",
    "peak_in_flight",
    "seconds_over_cap",
    "duplicates",
    "dead_lettered",
    "seed",
    "trace_hash",
)
"""The columns of a row, in this order."""


def row(**changes: Any) -> Row:
    """A row of a job that ran to its end as it should, but for what is changed."""
    made: dict[str, Any] = {
        "world": "realistic",
        "policy": "reserve",
        "permit_store": "ledger",
        "workers": 4,
        "cap": 100,
        "tasks": 20_000,
        "window_s": None,
        "completed": 20_000,
        "receives": 20_000,
        "amplification": 1.0,
        "receive_calls_per_task": 0.12,
        "empty_receives": 3,
        "bounces": 0,
        "permit_calls_per_task": 0.03,
        "elapsed_s": 484.0,
        "utilisation": 0.98,
        "utilisation_steady": 1.0,
        "peak_in_flight": 100,
        "seconds_over_cap": 0.0,
        "duplicates": 0,
        "dead_lettered": 0,
        "seed": 0,
        "trace_hash": "a" * 64,
    }
    assert made.keys() >= changes.keys()
    return {**made, **changes}
