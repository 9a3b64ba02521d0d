"""Read the log of events that went to receivers, and send some again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from ulid import ULID

from conveyor.aio.concurrency import for_each
from conveyor.domain import strict_json
from conveyor.domain.api_keys import UnsealError
from conveyor.domain.deliveries import DeliveryStatus, EventDelivery, dropped, replayed
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import Job, JobStatus, RunStatus
from conveyor.domain.run_events import TEST
from conveyor.domain.text_rules import parse_rfc3339
from conveyor.ports.deliveries import DeliveryFilter, DeliveryLog
from conveyor.ports.records import StoredResponse
from conveyor.records.signed_events import EventSigner
from conveyor.service.context import Context
from conveyor.service.idempotency import IdempotencyClaim, IdempotentRequests, KeyedRequest, Reply
from conveyor.service.responses import delivery_body, encode, logged_delivery_body
from conveyor.service.results import Cursors
from conveyor.service.schemas import (
    DeliveriesPage,
    DeliveryHeadersBody,
    LoggedDeliveryBody,
    ReplayedBody,
    present,
)

MOST_REPLAYED = 1_000
"""Deliveries that one call replays."""
MOST_DROPPED = 1_000
"""Deliveries looked at to be dropped with a webhook or job. The others are dropped when due."""
MOST_READ = 1_000
"""Deliveries read for a page of those in one status."""
SIDE_BY_SIDE = 10
"""Jobs read, and deliveries dropped, at a time."""
_PAGE = 100
_TRIES = 8
"""Changes of a delivery by others that a replay yields to."""


class DeliveryQueries:
    """Reads deliveries, one at a time or in pages, and signs them anew."""

    def __init__(self, context: Context, cursors: Cursors, signer: EventSigner) -> None:
        self._context = context
        self._cursors = cursors
        self._signer = signer

    async def list_deliveries(
        self,
        caller: str,
        job_id: str | None,
        *,
        status: DeliveryStatus | None,
        since: int,
        cursor: str | None,
        limit: int,
    ) -> DeliveriesPage:
        """Return a page of a caller's deliveries, or of a job's; newest first.

        Raises ConveyorError: not_found; invalid_argument for a bad cursor.
        """
        if job_id is not None:
            await self._context.live_job(caller, job_id)
        scope = f"deliveries:{caller}:{job_id}:{status}:{since}"
        wanted = DeliveryFilter(
            caller=caller,
            job_id=job_id,
            since=since,
            before=self._cursors.decode(cursor, scope=scope) if cursor is not None else None,
        )
        if status is None:
            found = await self._context.deliveries.list_deliveries(wanted, limit=limit + 1)
            after = found[limit - 1].delivery_id if len(found) > limit else None
        else:
            found, after = await self._in_status(wanted, status, limit)
        following = None if after is None else self._cursors.encode(after, scope=scope)
        return DeliveriesPage([delivery_body(one) for one in found[:limit]], present(following))

    async def _in_status(
        self, wanted: DeliveryFilter, status: DeliveryStatus, limit: int
    ) -> tuple[list[EventDelivery], str | None]:
        """Return the deliveries in a status among the next MOST_READ, at most `limit`, and the id
        after which the list goes on. They may be too many to go through for one that is rare."""
        found: list[EventDelivery] = []
        after, read = wanted.before, 0
        async for page in _pages(self._context.deliveries, wanted, most=MOST_READ):
            read += len(page)
            for delivery in page:
                if len(found) == limit:
                    return found, after
                after = delivery.delivery_id
                if delivery.status is status:
                    found.append(delivery)
        return found, after if read == MOST_READ else None

    async def get_delivery(self, caller: str, delivery_id: str) -> LoggedDeliveryBody:
        """Return a delivery with its bytes and attempts. Raises ConveyorError(not_found)."""
        delivery, _ = await find_delivery(self._context, caller, delivery_id)
        return logged_delivery_body(delivery)

    async def sign(self, caller: str, delivery_id: str) -> DeliveryHeadersBody:
        """Return the headers of a delivery as if it were sent now.

        They are signed if the webhook of its job says so; where there is no webhook any more, if
        the caller has a key. Raises ConveyorError: not_found; unavailable if this server cannot
        open the key.
        """
        delivery, job = await find_delivery(self._context, caller, delivery_id)
        webhook = None if job is None else job.webhook
        signed = await self._signer.has_active_key(caller) if webhook is None else webhook.signature
        try:
            headers = await self._signer.headers(
                caller,
                delivery.body,
                event_id=delivery.delivery_id,
                attempt=max(delivery.attempt_count, 1),
                signed=signed,
                replay=delivery.ladder > 1,
            )
        except UnsealError as error:
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, f"the event cannot be signed: {error}", retry_after=1
            ) from None
        return DeliveryHeadersBody(headers)


async def find_delivery(
    context: Context, caller: str, delivery_id: str
) -> tuple[EventDelivery, Job | None]:
    """Return a caller's delivery and its job, None for a test event.

    Raises ConveyorError(not_found), also where the job is being deleted.
    """
    delivery = await context.deliveries.get_delivery(caller, delivery_id)
    if delivery is None:
        raise not_found("delivery")
    if delivery.job_id == TEST:
        return delivery, None
    view = await context.jobs.get_job(caller, delivery.job_id)
    if view is None or view.job.status is JobStatus.DELETED:
        raise not_found("delivery")
    return delivery, view.job


async def drop_owed(context: Context, caller: str, job_id: str) -> None:
    """Drop those of the newest MOST_DROPPED deliveries of a job that are owed, once its webhook or
    itself is gone.

    An older one, or one that has just changed, is left to its worker, which finds that at the next
    attempt.
    """
    log = context.deliveries

    async def drop(delivery: EventDelivery) -> None:
        await log.change_delivery(delivery, dropped(delivery, now=context.clock.now()))

    async for page in _pages(log, DeliveryFilter(caller=caller, job_id=job_id), most=MOST_DROPPED):
        owed = [one for one in page if one.status is DeliveryStatus.PENDING]
        await for_each(drop, owed, limit=SIDE_BY_SIDE)


async def _pages(
    log: DeliveryLog, wanted: DeliveryFilter, *, most: int | None = None
) -> AsyncIterator[list[EventDelivery]]:
    """Yield the deliveries that a filter names, newest first: all of them, or `most`."""
    left = most
    while left is None or left > 0:
        size = _PAGE if left is None else min(_PAGE, left)
        page = await log.list_deliveries(wanted, limit=size)
        yield page
        if len(page) < size:
            return
        wanted = msgspec.structs.replace(wanted, before=page[-1].delivery_id)
        left = None if left is None else left - len(page)


class _Window(msgspec.Struct, frozen=True, kw_only=True):
    status: DeliveryStatus
    since: int
    until: int | None


class DeliveryReplays:
    """Begins new ladders for deliveries: the same id and the same bytes are sent again."""

    def __init__(self, context: Context, once: IdempotentRequests) -> None:
        self._context = context
        self._log = context.deliveries
        self._once = once

    async def replay(
        self, caller: str, delivery_id: str, *, keyed: KeyedRequest | None = None
    ) -> Reply:
        """Replay one delivery, whatever became of it.

        Raises ConveyorError: not_found; conflict for a test event, if its job has no webhook that
        asks for it, or if its run was deleted; idempotency_key_conflict.
        """

        async def work(claim: IdempotencyClaim) -> StoredResponse:
            queued = await self._replay_one(caller, delivery_id, claim)
            answer = StoredResponse(202, encode(delivery_body(queued)))
            await self._once.keep(claim, answer)
            return answer

        return await self._once.answer(keyed, work)

    async def _replay_one(
        self, caller: str, delivery_id: str, claim: IdempotencyClaim
    ) -> EventDelivery:
        """Replay a delivery; return it as it is if the call whose claim was taken over has done
        so, which the instant of the claim's id tells."""
        delivery, job = await find_delivery(self._context, caller, delivery_id)
        mark = ULID.from_str(claim.created_id).milliseconds
        if claim.taken_over and delivery.replayed_at == mark:
            return delivery
        if job is None:
            raise ConveyorError(ErrorCode.CONFLICT, "a test event is not replayed: test again")
        if job.webhook is None:
            raise ConveyorError(ErrorCode.CONFLICT, "the job has no webhook")
        if not _asks_for(job, delivery):
            raise ConveyorError(
                ErrorCode.CONFLICT, f"the webhook does not ask for {delivery.event_type}"
            )
        if not await self._has_run(delivery):
            raise ConveyorError(ErrorCode.CONFLICT, "the run was deleted")
        queued = await self._queue(delivery, None, now=mark, webhook_number=job.webhook_number)
        if queued is None:
            raise not_found("delivery")
        return queued

    async def replay_window(self, caller: str, body: bytes, *, keyed: KeyedRequest | None) -> Reply:
        """Replay the deliveries in a status and a window of time that a JSON document names, the
        newest MOST_REPLAYED of them.

        Raises ConveyorError: invalid_argument; idempotency_key_conflict.
        """
        window = _parse_window(strict_json.decode(body))

        async def work(claim: IdempotencyClaim) -> StoredResponse:
            count = await self._replay_all(caller, window, claim)
            answer = StoredResponse(202, encode(ReplayedBody(count)))
            await self._once.keep(claim, answer)
            return answer

        return await self._once.answer(keyed, work)

    async def _replay_all(self, caller: str, window: _Window, claim: IdempotencyClaim) -> int:
        """Replay a window, and return the number of deliveries queued.

        The instant of the claim's id marks them, so that whoever takes over the claim of a call
        that died counts those, and queues none of them again. What `_replay_one` refuses is left as
        it is.
        """
        mark = ULID.from_str(claim.created_id).milliseconds
        count = 0
        # Those that the call before has queued are in another status by now.
        among = DeliveryFilter(
            caller=caller,
            status=None if claim.taken_over else window.status,
            since=window.since,
            until=window.until,
        )
        async for page in _pages(self._log, among):
            wanted = [one for one in page if one.status is window.status and one.job_id != TEST]
            numbers = await self._replayable(wanted)
            for delivery in page:
                if claim.taken_over and delivery.replayed_at == mark:
                    count += 1
                elif (number := numbers.get(delivery.delivery_id)) is not None:
                    queued = await self._queue(
                        delivery, window.status, now=mark, webhook_number=number
                    )
                    count += queued is not None
                if count == MOST_REPLAYED:
                    return count
        return count

    async def _replayable(self, deliveries: Sequence[EventDelivery]) -> dict[str, int]:
        """Return those whose job is there and has a webhook that asks for them, and whose run was
        not deleted: the numbers of the webhooks by the ids of the deliveries."""
        jobs: dict[str, Job] = {}
        numbers: dict[str, int] = {}

        async def look(job_id: str) -> None:
            job = await self._context.jobs.find_job(job_id)
            if job is not None and job.status is not JobStatus.DELETED:
                jobs[job_id] = job

        async def judge(delivery: EventDelivery) -> None:
            job = jobs.get(delivery.job_id)
            if job is not None and _asks_for(job, delivery) and await self._has_run(delivery):
                numbers[delivery.delivery_id] = job.webhook_number

        job_ids = {one.job_id for one in deliveries}
        await for_each(look, sorted(job_ids), limit=SIDE_BY_SIDE)
        await for_each(judge, deliveries, limit=SIDE_BY_SIDE)
        return numbers

    async def _has_run(self, delivery: EventDelivery) -> bool:
        run = await self._context.runs.get_run(delivery.caller, delivery.job_id, delivery.run_id)
        return run is not None and run.status is not RunStatus.DELETED

    async def _queue(
        self,
        delivery: EventDelivery,
        status: DeliveryStatus | None,
        *,
        now: int,
        webhook_number: int,
    ) -> EventDelivery | None:
        """Begin a new ladder; return None if the delivery is gone, or has left `status`."""
        for _ in range(_TRIES):
            after = replayed(delivery, now=now, webhook_number=webhook_number)
            if await self._log.change_delivery(delivery, after):
                return after
            found = await self._log.get_delivery(delivery.caller, delivery.delivery_id)
            if found is None or status not in (None, found.status):
                return None
            delivery = found
        raise ConveyorError(
            ErrorCode.UNAVAILABLE, "the delivery changes all the time", retry_after=1
        )


def _asks_for(job: Job, delivery: EventDelivery) -> bool:
    return job.webhook is not None and delivery.event_type in job.webhook.events


def _parse_window(document: object) -> _Window:
    """Read the window of a replay. Raises ConveyorError(invalid_argument), naming the field."""
    if not isinstance(document, dict):
        raise _invalid("the request body must be a JSON object")
    words = [status.value for status in DeliveryStatus]
    status = document.get("status")
    if status is None:
        status = DeliveryStatus.FAILED.value
    if status not in words:
        raise _invalid(f"status: must be one of {', '.join(words)}")
    since = _instant(document, "since")
    if since is None:
        raise _invalid("since: must be the begin of the window, as 2026-01-31T12:00:00Z")
    return _Window(status=DeliveryStatus(status), since=since, until=_instant(document, "until"))


def _instant(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    try:
        return parse_rfc3339(value if isinstance(value, str) else "")
    except ValueError:
        raise _invalid(f"{name}: must be a time with its zone, as 2026-01-31T12:00:00Z") from None


def _invalid(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, problem)
