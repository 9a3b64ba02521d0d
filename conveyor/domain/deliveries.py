"""Deliveries: an event on its way to a receiver, its attempts, and the instants of further ones.

A ladder of waits leads from the first attempt to the last one. A replay begins a ladder of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec import structs
from ulid import ULID

from conveyor.domain.run_events import TEST

LADDER = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 72_000)
"""Seconds between an attempt that failed and the next one."""
SHORTENED = 0.2
"""Share by which randomness shortens a wait at most."""
LONGEST = 72 * 3_600
"""Seconds after the first attempt of a ladder at which the last one is made at the latest."""
GONE_PAUSE = 3_600
"""Seconds between an answer of 410 and the one attempt that follows it."""
MOST_ATTEMPTS_KEPT = 50
DELIVERED = "delivered"
"""The outcome of an attempt that a 2xx answered."""
WAITING_STATUSES = (429, 503)
"""Answers whose Retry-After counts."""
GONE = 410
TEST_EVENT = "webhook.test"
MOST_JUDGED = 20
"""The newest deliveries of a job that tell how its receiver does."""


class DeliveryStatus(StrEnum):
    """pending → delivered | failed | dropped; a replay leads back to pending."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    DROPPED = "dropped"


class DeliveryAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to a receiver, numbered from 1 through all ladders.

    `outcome` is DELIVERED, or the failure in the words of the API; it is empty while the attempt is
    under way, and stays so if its worker died. `headers` are those sent, signatures cut short.
    `next_at` is the instant of the next attempt, 0 if there is none. Instants are in milliseconds
    since the epoch.
    """

    number: int
    started_at: int
    outcome: str = ""
    milliseconds: int = 0
    host: str = ""
    status: int | None = None
    content_type: str = ""
    length: int | None = None
    next_at: int = 0
    is_replay: bool = False
    headers: dict[str, str] = {}


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt. `error` is empty after a 2xx; `retry_after` is in seconds, None
    without a valid header."""

    error: str = ""
    milliseconds: int = 0
    host: str = ""
    status: int | None = None
    content_type: str = ""
    length: int | None = None
    retry_after: float | None = None
    headers: dict[str, str] = {}


class EventDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event for one receiver: `body` is sent byte for byte at each attempt.

    `delivery_id` is the id of the event. `due_at` is the instant of the next attempt, 0 unless the
    delivery is pending; `leased_until` is when the lease of the worker that makes an attempt
    lapses, 0 if there is none. `ladder` counts the replays from 1; `first_at`, `failures` and
    `is_last` are of the present ladder: its first attempt, its failed ones, and whether the next
    failure ends it. `webhook_number` is that of the job's webhook which it is for: it goes to no
    later one, unless it is replayed. `attempts` holds the newest MOST_ATTEMPTS_KEPT of
    `attempt_count`. `version` grows with each change. Instants are in milliseconds since the epoch.
    """

    delivery_id: str
    caller: str
    job_id: str
    run_id: str
    event_type: str
    body: bytes
    created_at: int
    status: DeliveryStatus = DeliveryStatus.PENDING
    due_at: int = 0
    leased_until: int = 0
    ladder: int = 1
    replayed_at: int = 0
    first_at: int = 0
    failures: int = 0
    is_last: bool = False
    webhook_number: int = 0
    attempt_count: int = 0
    attempts: tuple[DeliveryAttempt, ...] = ()
    updated_at: int = 0
    version: int = 1


def event_id(run_id: str, event_type: str, *, ended_at: int) -> str:
    """Return the id of a run's event: a ULID of the end's instant, in milliseconds, and a digest,
    so that whoever builds the event again gives it the same id."""
    digest = hashlib.sha256(f"{run_id}:{event_type}".encode()).digest()
    return str(ULID.from_bytes(ended_at.to_bytes(6) + digest[:10]))


def begin_test(event_id: str, caller: str, body: bytes, *, now: int) -> EventDelivery:
    """Make the record of a test event, with its only attempt begun. It is never due, and has failed
    unless that attempt succeeds."""
    return EventDelivery(
        delivery_id=event_id,
        caller=caller,
        job_id=TEST,
        run_id=TEST,
        event_type=TEST_EVENT,
        body=body,
        created_at=now,
        status=DeliveryStatus.FAILED,
        first_at=now,
        attempt_count=1,
        attempts=(DeliveryAttempt(number=1, started_at=now),),
        updated_at=now,
    )


def end_test(delivery: EventDelivery, result: AttemptResult, *, now: int) -> EventDelivery:
    """End the attempt of a test event."""
    status = DeliveryStatus.FAILED if result.error else DeliveryStatus.DELIVERED
    return _changed(_noted(delivery, 1, result, next_at=0), now=now, status=status)


def begin_attempt(delivery: EventDelivery, *, now: int, lapses_at: int) -> EventDelivery:
    """Lease a delivery for one attempt, and number it. An attempt whose worker died keeps its
    number, and climbs no rung."""
    number = delivery.attempt_count + 1
    begun = DeliveryAttempt(number=number, started_at=now, is_replay=delivery.ladder > 1)
    return _changed(
        delivery,
        now=now,
        leased_until=lapses_at,
        first_at=delivery.first_at or now,
        attempt_count=number,
        attempts=(*delivery.attempts, begun)[-MOST_ATTEMPTS_KEPT:],
    )


def end_attempt(
    delivery: EventDelivery,
    number: int,
    ladder: int,
    result: AttemptResult,
    *,
    now: int,
    random: float,
) -> EventDelivery:
    """End the attempt `number` that was begun in `ladder`, and give its lease back.

    `delivery` is as it stands now. Only the attempt changes where a replay has begun a new ladder,
    where the delivery has ended, and where the attempt failed after a later one had begun, because
    its lease had lapsed. `random` is in [0, 1).
    """
    is_newest = number == delivery.attempt_count
    leased_until = 0 if is_newest else delivery.leased_until
    is_past = delivery.ladder != ladder or delivery.status is not DeliveryStatus.PENDING
    if is_past or (result.error and not is_newest):
        noted = _noted(delivery, number, result, next_at=0)
        return _changed(noted, now=now, leased_until=leased_until)
    if not result.error:
        ended = _noted(delivery, number, result, next_at=0)
        return _changed(
            ended,
            now=now,
            leased_until=leased_until,
            due_at=0,
            status=DeliveryStatus.DELIVERED,
        )
    failures = delivery.failures + 1
    due_at = _next_due(delivery, failures, result, now=now, random=random)
    return _changed(
        _noted(delivery, number, result, next_at=due_at),
        now=now,
        leased_until=0,
        due_at=due_at,
        failures=failures,
        is_last=result.status == GONE or due_at >= delivery.first_at + LONGEST * 1_000,
        status=DeliveryStatus.PENDING if due_at else DeliveryStatus.FAILED,
    )


def interrupted(delivery: EventDelivery, *, now: int) -> EventDelivery:
    """Give the lease of an attempt back whose outcome will never be known: it climbs no rung, and
    the next one is due when this one was."""
    return _changed(delivery, now=now, leased_until=0)


def dropped(delivery: EventDelivery, *, now: int) -> EventDelivery:
    """End a delivery that is no longer owed."""
    return _changed(delivery, now=now, leased_until=0, due_at=0, status=DeliveryStatus.DROPPED)


def put_off(delivery: EventDelivery, *, due_at: int, now: int) -> EventDelivery:
    """Move the next attempt to a later instant."""
    return _changed(delivery, now=now, due_at=due_at)


def replayed(
    delivery: EventDelivery, *, now: int, webhook_number: int | None = None
) -> EventDelivery:
    """Begin a new ladder, whatever became of the one before, for the job's webhook of that number,
    by default the same as before. An attempt that is under way keeps its lease, and ends as
    itself."""
    number = delivery.webhook_number if webhook_number is None else webhook_number
    return _changed(
        delivery,
        now=now,
        status=DeliveryStatus.PENDING,
        due_at=now,
        ladder=delivery.ladder + 1,
        replayed_at=now,
        first_at=0,
        failures=0,
        is_last=False,
        webhook_number=number,
    )


class ReceiverHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a receiver, as its newest deliveries tell it.

    `outcome` and `attempted_at` are of the last attempt that ended, empty and 0 before the first.
    `failing_since` is the instant of the first failure since the last success, 0 after a success;
    `next_at` that of the next attempt, 0 if none is owed.
    """

    outcome: str = ""
    attempted_at: int = 0
    failing_since: int = 0
    next_at: int = 0


def receiver_health(deliveries: Sequence[EventDelivery]) -> ReceiverHealth:
    """Judge a receiver by deliveries to it, in any order."""
    ended = sorted(
        (attempt for one in deliveries for attempt in one.attempts if attempt.outcome),
        key=lambda attempt: attempt.started_at,
    )
    due = [one.due_at for one in deliveries if one.status is DeliveryStatus.PENDING]
    failing_since = 0
    for attempt in ended:
        if attempt.outcome == DELIVERED:
            failing_since = 0
        elif not failing_since:
            failing_since = attempt.started_at
    last = ended[-1] if ended else None
    return ReceiverHealth(
        outcome="" if last is None else last.outcome,
        attempted_at=0 if last is None else last.started_at,
        failing_since=failing_since,
        next_at=min(due, default=0),
    )


def _next_due(
    delivery: EventDelivery, failures: int, result: AttemptResult, *, now: int, random: float
) -> int:
    """Return when to try again, 0 for never."""
    latest = delivery.first_at + LONGEST * 1_000
    if delivery.is_last or failures > len(LADDER) or now >= latest:
        return 0
    wait = LADDER[failures - 1] * (1 - SHORTENED * random)
    if result.status == GONE:
        wait = GONE_PAUSE
    elif result.status in WAITING_STATUSES and result.retry_after is not None:
        wait = max(wait, min(result.retry_after, LADDER[min(failures, len(LADDER) - 1)]))
    return min(now + round(wait * 1_000), latest)


def _noted(
    delivery: EventDelivery, number: int, result: AttemptResult, *, next_at: int
) -> EventDelivery:
    attempts = tuple(
        _ended(attempt, result, next_at) if attempt.number == number else attempt
        for attempt in delivery.attempts
    )
    return structs.replace(delivery, attempts=attempts)


def _ended(attempt: DeliveryAttempt, result: AttemptResult, next_at: int) -> DeliveryAttempt:
    return structs.replace(
        attempt,
        outcome=result.error or DELIVERED,
        milliseconds=result.milliseconds,
        host=result.host,
        status=result.status,
        content_type=result.content_type,
        length=result.length,
        next_at=next_at,
        headers=result.headers,
    )


def _changed(delivery: EventDelivery, *, now: int, **fields: object) -> EventDelivery:
    return structs.replace(
        delivery, updated_at=max(delivery.updated_at, now), version=delivery.version + 1, **fields
    )
