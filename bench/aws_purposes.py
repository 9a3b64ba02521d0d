"""Finds the purpose of an AWS call from the functions on the stack when it was made."""

from __future__ import annotations

import sys
from types import FrameType

PURPOSES = {
    "dynamodb.claims.Claims._claim_pending": "claim",
    "dynamodb.claims.Claims._take_over": "claim",
    "dynamodb.claims.Claims.renew": "renewal of claims",
    "dynamodb.claims.Claims.release": "claim undone",
    "dynamodb.claims.Claims._confirm": "claim undone",
    "dynamodb.claims.settle_row": "end of a task",
    "dynamodb.counters": "counters",
    "dynamodb.failure_groups": "failure groups",
    "dynamodb.run_reads.RunReads": "is the run live",
    "dynamodb.run_rows.RunPlaces": "where a run lies",
    "dynamodb.pacing": "pacing of hosts",
    "dynamodb.permits": "permits",
    "dynamodb.permits.DynamoWorkers": "reports",
    "dynamodb.task_rows.insert_items": "rows",
    "dynamodb.task_rows.remove_untouched": "rows",
    "dynamodb.ingestion": "checkpoint",
    "dynamodb.ingestion.finish_ingestion": "end of the ingestion",
    "dynamodb.ingestion.repair_late_rows": "end of the ingestion",
    "dynamodb.runs.DispatchReads": "discovery",
    "dynamodb.runs.query_all": "discovery",
    "dynamodb.outbox": "outbox",
    "dynamodb.sweeping": "the sweep",
    "dynamodb.client.expired_items": "the sweep",
    "startup_checks": "beat of the fleet",
    "sqs.registry.QueueRegistry": "address of a queue",
    "sqs.queues.QueueDepths": "depth of a queue",
    "handlers.sweep": "the sweep",
    "handlers.notify": "outbox",
    "handlers.callbacks": "outbox",
    "handlers.settle": "webhooks",
    "handlers.deliver": "webhooks",
    "handlers.ingest": "ingestion",
    "handlers.task": "body of a result",
    "handlers.packs": "body of a result",
    "records.job_templates": "templates",
    "engine.discovery": "discovery",
    "engine.delivery.AckBatcher": "acknowledgements",
    "engine.delivery.MessageReturner": "messages given back",
    "service": "the API",
    "http": "the API",
}
"""Purposes by function, as its path below the package. The innermost function on the stack with an
entry counts, by its longest name in the table."""
OTHER = "other"
_PACKAGE = "conveyor."
_BINDING = "conveyor.prod."


def purpose() -> str:
    """Return the purpose of the present call, when called from within it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = purpose_of(str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname)
        if found is not None:
            return found
        frame = frame.f_back
    return OTHER


def purpose_of(module: str, function: str) -> str | None:
    """Return the purpose of a function of Conveyor, or None if it has none."""
    if not module.startswith(_PACKAGE):
        return None
    short = module.removeprefix(_BINDING).removeprefix(_PACKAGE)
    names = f"{short}.{function}".split(".")
    for length in range(len(names), 0, -1):
        found = PURPOSES.get(".".join(names[:length]))
        if found is not None:
            return found
    return None
