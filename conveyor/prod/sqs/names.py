"""What the queues of an environment are called, and what each is made with."""

from __future__ import annotations

import json
import re

RETENTION = 1_209_600
"""Seconds that a message is kept: 14 days, the most that SQS takes."""
_RUN = re.compile(r"run-(.+)")


def prefix(environment: str) -> str:
    """What the names of an environment's queues begin with."""
    return f"conveyor-{environment}-"


def run_of(queue: str) -> str | None:
    """The run whose queue this is; None for the others."""
    found = _RUN.fullmatch(queue)
    return None if found is None else found[1]


def run_queue_name(environment: str, run_id: str, generation: int) -> str:
    """The name in SQS of a run's queue: a name that was deleted is blocked for a minute, so each
    queue of a run has its own."""
    return f"{prefix(environment)}run-{run_id}-{generation}"


def attributes(*, dead_letters: str, max_receives: int) -> dict[str, str]:
    """What a queue with a receive limit is made with. `dead_letters` is the ARN of the queue that
    takes what was received too often."""
    redrive = {"deadLetterTargetArn": dead_letters, "maxReceiveCount": str(max_receives)}
    return {"MessageRetentionPeriod": str(RETENTION), "RedrivePolicy": json.dumps(redrive)}
