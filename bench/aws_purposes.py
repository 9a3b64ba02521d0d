"""What a call of AWS is made for: told by the functions that were on their way when it was made."""

from __future__ import annotations

import sys
from types import FrameType

PURPOSES = {
    "dynamodb.claims.Claims._take": "claim",
    "dynamodb.claims.Claims._take_over": "claim",
    "dynamodb.claims.Claims.renew": "renewal of claims",
    "dynamodb.claims.Claims.release": "claim undone",
    "dynamodb.claims.Claims._begin": "claim undone",
    "dynamodb.settling": "end of a task",
    "dynamodb.counters": "counters",
    "dynamodb.run_reads": "is the run live",
    "dynamodb.permits": "permits",
    "dynamodb.task_writes": "rows",
    "dynamodb.ingest_end": "end of the ingestion",
    "dynamodb.ingestion": "checkpoint",
    "dynamodb.ingest_counts": "checkpoint",
    "dynamodb.dispatch": "discovery",
    "dynamodb.fleet": "beat of the fleet",
    "dynamodb.places": "where a run lies",
    "dynamodb.outbox": "outbox",
    "dynamodb.sweeping": "the sweep",
    "dynamodb.due": "the sweep",
    "sqs.addresses": "address of a queue",
    "sqs.depths": "depth of a queue",
    "handlers.sweep": "the sweep",
    "handlers.notify": "outbox",
    "handlers.templates": "templates",
    "engine.discovery": "discovery",
    "engine.acknowledging": "acknowledgements",
    "engine.returns": "messages given back",
    "handlers.ingest": "ingestion",
    "handlers.task": "body of a result",
    "service": "the API",
    "http": "the API",
}
"""By where a function is, below the package. The innermost function that is in one of these counts;
none of them is within another."""
OTHER = "other"
_PACKAGE = "conveyor."
_BINDING = "conveyor.prod."


def purpose() -> str:
    """What the present call is made for, asked from within it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = purpose_of(str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname)
        if found is not None:
            return found
        frame = frame.f_back
    return OTHER


def purpose_of(module: str, function: str) -> str | None:
    """What a function of Conveyor stands for; None where it says nothing."""
    if not module.startswith(_PACKAGE):
        return None
    short = module.removeprefix(_BINDING).removeprefix(_PACKAGE)
    names = f"{short}.{function}".split(".")
    for length in range(1, len(names) + 1):
        found = PURPOSES.get(".".join(names[:length]))
        if found is not None:
            return found
    return None
