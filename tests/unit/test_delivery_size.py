"""The largest record of a delivery fits into an item of DynamoDB, which holds 400 KB."""

from __future__ import annotations

from conveyor.domain.deliveries import (
    MOST_ATTEMPTS_KEPT,
    AttemptResult,
    EventDelivery,
    begin_attempt,
    end_attempt,
    event_id,
    replayed,
)
from conveyor.domain.model import (
    Job,
    JobStatus,
    Run,
    RunFailure,
    RunStats,
    RunStatus,
    Spend,
    TaskFailure,
)
from conveyor.domain.run_events import build_webhook_event
from conveyor.domain.signatures import SigningSecret, sign
from conveyor.domain.text_rules import MAX_METADATA_KEY, MAX_METADATA_KEYS, MAX_METADATA_VALUE
from conveyor.gateway.headers import MAX_CONTENT_TYPE
from conveyor.gateway.refusals import MAX_TEXT
from conveyor.prod.dynamodb.deliveries import new_delivery_item
from conveyor.records.signed_events import ATTEMPT, EVENT_ID, REPLAY, cut_signatures

NOW = 1_767_225_600_000
MOST = 300_000
HUGE = 2**63 - 1
ULID = "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"
CALLER = "c" * 64
WIDEST = "\x01"
"""A character that takes most bytes in JSON: six."""


def largest_event() -> bytes:
    """The bytes of an event with the most metadata, counters and texts."""
    job = Job(
        job_id=ULID,
        caller=CALLER,
        status=JobStatus.OPEN,
        created_at=NOW,
        updated_at=NOW,
        external_id="x" * 128,
        metadata={
            f"{number:02}" + "😀" * (MAX_METADATA_KEY - 2): WIDEST * MAX_METADATA_VALUE
            for number in range(MAX_METADATA_KEYS)
        },
    )
    run = Run(
        run_id=ULID,
        job_id=ULID,
        run_sequence=HUGE,
        status=RunStatus.FAILED,
        created_at=NOW,
        updated_at=NOW,
        stats=RunStats(
            total=HUGE,
            successful=HUGE,
            failed=HUGE,
            failure_reasons=dict.fromkeys(map(str, TaskFailure), HUGE),
            spend=Spend(HUGE, 0.1 + 0.2),
        ),
        failure_reason=RunFailure.INSUFFICIENT_CREDITS,
        failure_detail=WIDEST * MAX_TEXT,
    )
    origin = "https://" + "h" * 253
    return build_webhook_event(
        run, RunStatus.FAILED, job, event_id=ULID, ended_at=NOW, origin=origin
    )


def largest_result(body: bytes, number: int) -> AttemptResult:
    """The end of an attempt that a receiver answered with the longest texts."""
    key = SigningSecret(ULID, bytes(32))
    headers = {EVENT_ID: ULID, ATTEMPT: str(number), REPLAY: "true"} | sign(
        body, event_id=ULID, timestamp=NOW // 1_000, active=key, candidate=key
    )
    return AttemptResult(
        error="transport_error:signing key unreadable",
        milliseconds=HUGE,
        host="h" * 253,
        status=999,
        content_type='"' * MAX_CONTENT_TYPE,
        length=HUGE,
        headers=cut_signatures(headers),
    )


def test_the_largest_record_fits_into_an_item() -> None:
    body = largest_event()
    delivery = EventDelivery(
        delivery_id=event_id(ULID, "run.completed", ended_at=NOW),
        caller=CALLER,
        job_id=ULID,
        run_id=ULID,
        event_type="run.completed",
        body=body,
        created_at=NOW,
        due_at=NOW,
        updated_at=NOW,
    )
    sizes = []
    for number in range(1, MOST_ATTEMPTS_KEPT + 20):
        begun = begin_attempt(replayed(delivery, now=NOW), now=NOW, lapses_at=NOW + 60_000)
        result = largest_result(body, number)
        delivery = end_attempt(begun, number, begun.ladder, result, now=NOW, random=0.0)
        sizes.append(len(str(new_delivery_item(delivery)["delivery"]).encode()))

    assert len(delivery.attempts) == MOST_ATTEMPTS_KEPT
    assert max(sizes) < MOST, sizes[-1]
