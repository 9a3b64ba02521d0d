"""Signing keys, tests of receivers, webhooks of jobs, and the log of deliveries."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple, TextIO

import msgspec

from conveyor.client.api import Api
from conveyor.client.commands import ServerTarget, Terminal, about
from conveyor.client.errors import ClientError, ServerRefused
from conveyor.client.jobs import NEWEST, SEARCHED, Nouns, find_by_beginning, find_job
from conveyor.client.output import clean_json, count, printable, to_the_second
from conveyor.client.program import FAILED, SUCCEEDED
from conveyor.client.wire import AttemptReply, DeliveryReply, WebhookReply, WebhookStatusReply
from conveyor.domain.errors import ErrorCode

PAGE = 100
"""Deliveries that one request lists."""
MOST_REPLAYED = 1_000
"""Deliveries that one call replays."""
LOG_HEADER = f"{'delivery':<26}  {'made, UTC':<19}  {'status':<9}  event, last outcome"


async def list_keys(target: ServerTarget, terminal: Terminal) -> int:
    """Print which signing keys there are."""
    async with target.connect(terminal) as api:
        keys = await api.signing_keys()
    slots = {"active": keys.active, "candidate": keys.candidate}
    for slot, key in slots.items():
        if key is not None:
            terminal.say(f"{slot:<10} {printable(key.kid)}  made {printable(key.created_at)}")
    if keys.active is None:
        terminal.warn("no signing key yet: conveyor keys rotate")
    terminal.give(keys)
    return SUCCEEDED


async def rotate_key(target: ServerTarget, terminal: Terminal) -> int:
    """Make a key, and print its secret alone on standard output."""
    if _goes_nowhere(sys.stdout):
        raise ClientError("the secret is shown once, and standard output keeps nothing of it")
    async with target.connect(terminal) as api:
        key = await api.rotate_key()
        try:
            if not terminal.gives_json:
                print(printable(key.secret), flush=True)
            terminal.give(key)
        except OSError as error:
            why = error.strerror or type(error).__name__
            back = await _way_back(api, target, key.kid)
            raise ClientError(
                f"key {printable(key.kid)} is made, but its secret could not be written ({why}): "
                f"{back}"
            ) from None
    terminal.warn(f"key {printable(key.kid)}: keep its secret, it is shown this once")
    return SUCCEEDED


def _goes_nowhere(stream: TextIO) -> bool:
    """Tell whether a stream is the null device, as a closed one is (see `program`)."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
    except OSError:
        return False


async def _way_back(api: Api, target: ServerTarget, kid: str) -> str:
    """Name the commands that put another key in the place of one whose secret is lost."""
    cancel, rotate, finalize = (
        target.command("keys", word) for word in ("cancel", "rotate", "finalize")
    )
    try:
        active = (await api.signing_keys()).active
    except ClientError:
        active = None
    is_first = active is not None and active.kid == kid
    return f"{rotate}, then {finalize}" if is_first else f"{cancel}, then {rotate}"


async def finalize_key(target: ServerTarget, terminal: Terminal) -> int:
    """Let the candidate sign, and print its id."""
    async with target.connect(terminal) as api:
        key = await api.finalize_key()
    terminal.say(f"key {printable(key.active_kid)} signs from now on; the one before is gone")
    terminal.give(key)
    return SUCCEEDED


async def cancel_rotation(target: ServerTarget, terminal: Terminal) -> int:
    """Remove the candidate."""
    async with target.connect(terminal) as api:
        candidate = (await api.signing_keys()).candidate
        await api.cancel_rotation()
    removed = None if candidate is None else candidate.kid
    terminal.say(
        "no rotation was under way: nothing to cancel"
        if removed is None
        else f"key {printable(removed)} is gone; the rotation is cancelled"
    )
    terminal.give({"candidate": None, "removed_kid": removed})
    return SUCCEEDED


async def test_webhook(target: ServerTarget, terminal: Terminal, url: str, *, signed: bool) -> int:
    """Have the server post a test event, and say what came of it; fail if it did not arrive."""
    async with target.connect(terminal) as api:
        tested = await api.test_webhook(url, signed=signed)
    outcome = "delivered" if tested.delivered else f"not delivered: {printable(tested.error or '')}"
    terminal.say(f"{outcome} ({tested.elapsed_ms} ms)")
    terminal.give(tested)
    return SUCCEEDED if tested.delivered else FAILED


async def show_webhook(target: ServerTarget, terminal: Terminal, job_id: str) -> int:
    """Show the webhook of a job, and how its receiver does."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            job = await api.job(job_id)
    if job.webhook is None:
        terminal.warn(f"job {printable(job_id)} has no webhook")
    else:
        terminal.say(f"job {printable(job_id)}: {_described(job.webhook)}")
        for line in _health(job.webhook_status):
            terminal.say(line)
    terminal.give({"job_id": job_id, "webhook": job.webhook, "webhook_status": job.webhook_status})
    return SUCCEEDED


def _described(webhook: WebhookReply) -> str:
    signed = "signed" if webhook.signature else "not signed"
    return f"{printable(webhook.url)}, {signed}, {', '.join(map(printable, webhook.events))}"


def _health(status: WebhookStatusReply | None) -> list[str]:
    if status is None:
        return ["no event yet; that of a run comes some seconds after its end"]
    last, at = printable(status.last_outcome or "under way"), status.last_attempt_at
    lines = [f"last attempt   {last}" + (f", {to_the_second(at)}" if at else "")]
    if status.failing_since:
        lines.append(f"failing since  {to_the_second(status.failing_since)}")
    if status.next_attempt_at:
        lines.append(f"next attempt   {to_the_second(status.next_attempt_at)}")
    return lines


async def set_webhook(
    target: ServerTarget, terminal: Terminal, job_id: str, webhook: Mapping[str, Any]
) -> int:
    """Give a job a receiver."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            made = await api.set_webhook(job_id, webhook)
    terminal.say(f"job {printable(job_id)}: {_described(made)}")
    terminal.give({"job_id": job_id, "webhook": made})
    return SUCCEEDED


async def remove_webhook(target: ServerTarget, terminal: Terminal, job_id: str) -> int:
    """Send no more events of a job."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            await api.remove_webhook(job_id)
    terminal.say(f"job {printable(job_id)}: no webhook")
    terminal.give({"job_id": job_id, "webhook": None})
    return SUCCEEDED


class LogFilter(NamedTuple):
    """The deliveries to list: in one status, made since a moment, and how many at most."""

    status: str | None = None
    since: str | None = None
    limit: int = PAGE


async def newest_deliveries(
    api: Api, job_id: str | None, wanted: LogFilter
) -> AsyncGenerator[DeliveryReply, None]:
    """Yield deliveries of a job, or of all, newest first."""
    cursor, limit = None, wanted.limit
    while limit > 0:
        page = await api.deliveries(
            job_id,
            limit=min(limit, PAGE),
            status=wanted.status,
            since=wanted.since,
            cursor=cursor,
        )
        for delivery in page.deliveries[:limit]:
            yield delivery
        limit -= len(page.deliveries)
        cursor = page.next_cursor
        if not cursor:
            return


async def list_deliveries(
    target: ServerTarget,
    terminal: Terminal,
    job: str | None,
    wanted: LogFilter,
    *,
    jsonl: bool,
) -> int:
    """List deliveries, newest first."""
    shown = 0
    async with target.connect(terminal) as api:
        job_id = None if job is None else await find_job(api, job)
        with about(job_id or "of the log"):
            async with aclosing(newest_deliveries(api, job_id, wanted)) as deliveries:
                async for delivery in deliveries:
                    if not shown and not jsonl:
                        print(LOG_HEADER)
                    raw = msgspec.json.encode(delivery).decode()
                    print(clean_json(raw) if jsonl else _delivery_line(delivery))
                    shown += 1
    if not shown and not jsonl:
        terminal.warn("no such deliveries")
    return SUCCEEDED


def _delivery_line(delivery: DeliveryReply) -> str:
    made = to_the_second(delivery.created_at)
    kind = printable(delivery.event_type)
    outcome = delivery.last_outcome
    tries = f" ({delivery.attempt_count})" if delivery.attempt_count > 1 else ""
    last = f", {printable(outcome)}{tries}" if outcome and outcome != "delivered" else ""
    status = printable(delivery.status)
    return f"{printable(delivery.delivery_id):<26}  {made:<19}  {status:<9}  {kind}{last}"


@contextmanager
def _about_delivery(delivery_id: str) -> Iterator[None]:
    """Name the delivery in every refusal."""
    shown = printable(delivery_id) or "''"
    if not delivery_id.strip("."):
        # In a path it would name something else.
        raise ClientError(f"no such delivery: {shown}")
    try:
        yield
    except ServerRefused as refusal:
        if refusal.code == ErrorCode.NOT_FOUND:
            raise ClientError(f"no such delivery: {shown}") from None
        raise ClientError(f"delivery {shown}: {refusal}") from None


async def _find_delivery(api: Api, text: str) -> str:
    """Return the id of the delivery that a text names: an id, in either case, the beginning of one,
    or `last`. Raises ClientError as `find_job` does."""
    if text == NEWEST:
        newest = (await api.deliveries(None, limit=1)).deliveries
        if not newest:
            raise ClientError("no events yet: they are those of jobs that have a webhook")
        return newest[0].delivery_id

    async def ids() -> AsyncGenerator[str, None]:
        wanted = LogFilter(limit=SEARCHED)
        async with aclosing(newest_deliveries(api, None, wanted)) as deliveries:
            async for delivery in deliveries:
                yield delivery.delivery_id

    return await find_by_beginning(text, ids, Nouns("delivery", "deliveries"))


async def show_delivery(target: ServerTarget, terminal: Terminal, delivery_id: str) -> int:
    """Show each attempt of a delivery."""
    async with target.connect(terminal) as api:
        delivery_id = await _find_delivery(api, delivery_id)
        with _about_delivery(delivery_id):
            delivery = await api.delivery(delivery_id)
    kind, status = printable(delivery.event_type), printable(delivery.status)
    terminal.say(f"delivery {printable(delivery.delivery_id)}: {kind}, {status}")
    terminal.say(f"job {printable(delivery.job_id)}  run {printable(delivery.run_id)}")
    for attempt in delivery.attempts:
        terminal.say(_attempt_line(attempt))
    if delivery.next_attempt_at:
        terminal.say(f"next  {to_the_second(delivery.next_attempt_at)}")
    terminal.give(delivery)
    return SUCCEEDED


def _attempt_line(attempt: AttemptReply) -> str:
    outcome = printable(attempt.outcome or "no outcome")
    host = f" from {printable(attempt.host)}" if attempt.host else ""
    again = ", replay" if attempt.is_replay else ""
    began = to_the_second(attempt.started_at)
    return f"{attempt.number:>4}  {began}  {outcome}{host} in {attempt.milliseconds} ms{again}"


async def replay_deliveries(
    target: ServerTarget, terminal: Terminal, deliveries: Sequence[str]
) -> int:
    """Send events again, in order, until the server refuses one."""
    async with target.connect(terminal) as api:
        for delivery_id in [await _find_delivery(api, text) for text in deliveries]:
            with _about_delivery(delivery_id):
                replayed = await api.replay_delivery(delivery_id)
            terminal.say(f"delivery {printable(delivery_id)}: {printable(replayed.status)}")
            terminal.give(replayed)
    return SUCCEEDED


async def replay_window(target: ServerTarget, terminal: Terminal, window: Mapping[str, Any]) -> int:
    """Queue the events of a window of time again."""
    async with target.connect(terminal) as api:
        key = target.pace.token(16).hex()
        done = await api.replay_deliveries(window, idempotency_key=key)
    more = "; there may be more: once again" if done.replayed >= MOST_REPLAYED else ""
    terminal.say(f"{count(done.replayed, 'event')} queued again{more}")
    terminal.give(done)
    return SUCCEEDED
