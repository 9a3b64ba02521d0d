"""Read the log of events that went to receivers, and send some again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Set
from typing import Any

import msgspec
from ulid import ULID

from conveyor.aio.concurrency import for_each
from conveyor.domain import strict_json
from conveyor.domain.api_keys import UnsealError
from conveyor.domain.deliveries import DeliveryStatus, EventDelivery, dropped, replayed
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import JobStatus
from conveyor.domain.run_events import TEST
from conveyor.domain.text_rules import parse_rfc3339
from conveyor.ports.deliveries import DeliveryFilter
from conveyor.ports.records import StoredResponse
from conveyor.records.signed_events import EventSigner
from conveyor.service.context import Context
from conveyor.service.idempotency import IdempotencyClaim, IdempotentRequests, KeyedRequest, Reply
from conveyor.service.responses import delivery_body, encode, logged_delivery_body
from conveyor.service.results import Cursors
from conveyor.service.schemas import (
    DeliveriesPage,
    DeliveryBody,
    DeliveryHeadersBody,
    LoggedDeliveryBody,
    ReplayedBody,
    present,
)

MOST_REPLAYED = 1_000
"""Deliveries that one call replays."""
MOST_DROPPED = 1_000
"""Deliveries dropped at once with a webhook or job. The others are dropped when due."""
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
            status=status,
            since=since,
            before=self._cursors.decode(cursor, scope=scope) if cursor is not None else None,
        )
        found = await self._context.deliveries.list_deliveries(wanted, limit=limit + 1)
        following = None
        if len(found) > limit:
            following = self._cursors.encode(found[limit - 1].delivery_id, scope=scope)
        return DeliveriesPage([delivery_body(one) for one in found[:limit]], present(following))

    async def get_delivery(self, caller: str, delivery_id: str) -> LoggedDeliveryBody:
        """Return a delivery with its bytes and attempts. Raises ConveyorError(not_found)."""
        return logged_delivery_body(await find_delivery(self._context, caller, delivery_id))

    async def sign(self, caller: str, delivery_id: str) -> DeliveryHeadersBody:
        """Return the headers of a delivery as if it were sent now.

        They are signed if the webhook of its job says so; where there is no webhook any more, if
        the caller has a key. Raises ConveyorError: not_found; unavailable if this server cannot
        open the key.
        """
        delivery = await find_delivery(self._context, caller, delivery_id)
        view = await self._context.jobs.get_job(caller, delivery.job_id)
        webhook = None if view is None else view.job.webhook
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


async def find_delivery(context: Context, caller: str, delivery_id: str) -> EventDelivery:
    """Return a caller's delivery. Raises ConveyorError(not_found)."""
    delivery = await context.deliveries.get_delivery(caller, delivery_id)
    if delivery is None:
        raise not_found("delivery")
    return delivery


async def drop_owed(context: Context, caller: str, job_id: str) -> None:
    """Drop the newest MOST_DROPPED deliveries that a job owes, once its webhook or itself is gone.

    One that has just changed is left to its worker, which finds that at the next attempt.
    """
    log = context.deliveries

    async def drop(delivery: EventDelivery) -> None:
        await log.change_delivery(delivery, dropped(delivery, now=context.clock.now()))

    owed = DeliveryFilter(caller=caller, job_id=job_id, status=DeliveryStatus.PENDING)
    for _ in range(0, MOST_DROPPED, _PAGE):
        page = await log.list_deliveries(owed, limit=_PAGE)
        await for_each(drop, page, limit=SIDE_BY_SIDE)
        if len(page) < _PAGE:
            return
        owed = msgspec.structs.replace(owed, before=page[-1].delivery_id)


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

    async def replay(self, caller: str, delivery_id: str) -> DeliveryBody:
        """Replay one delivery, whatever became of it.

        Raises ConveyorError: not_found; conflict for a test event, or if its job has no webhook.
        """
        delivery = await find_delivery(self._context, caller, delivery_id)
        if delivery.job_id == TEST:
            raise ConveyorError(ErrorCode.CONFLICT, "a test event is not replayed: test again")
        view = await self._context.live_job(caller, delivery.job_id)
        if view.job.webhook is None:
            raise ConveyorError(ErrorCode.CONFLICT, "the job has no webhook")
        now, number = self._context.clock.now(), view.job.webhook_number
        queued = await self._queue(delivery, None, now=now, webhook_number=number)
        if queued is None:
            raise not_found("delivery")
        return delivery_body(queued)

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
        that died counts those, and queues none of them again. What a job without a webhook owed is
        left as it is.
        """
        mark = ULID.from_str(claim.created_id).milliseconds
        count = 0
        async for page in self._pages(caller, window, every=claim.taken_over):
            wanted = [one for one in page if one.status is window.status and one.job_id != TEST]
            reachable = await self._with_webhooks({one.job_id for one in wanted})
            for delivery in page:
                if claim.taken_over and delivery.replayed_at == mark:
                    count += 1
                elif delivery.status is window.status and delivery.job_id in reachable:
                    number = reachable[delivery.job_id]
                    queued = await self._queue(
                        delivery, window.status, now=mark, webhook_number=number
                    )
                    count += queued is not None
                if count == MOST_REPLAYED:
                    return count
        return count

    async def _with_webhooks(self, job_ids: Set[str]) -> dict[str, int]:
        """Return the numbers of the webhooks of those jobs that are there and have one."""
        found: dict[str, int] = {}

        async def look(job_id: str) -> None:
            job = await self._context.jobs.find_job(job_id)
            if job is not None and job.status is not JobStatus.DELETED and job.webhook is not None:
                found[job_id] = job.webhook_number

        await for_each(look, sorted(job_ids), limit=SIDE_BY_SIDE)
        return found

    async def _pages(
        self, caller: str, window: _Window, *, every: bool
    ) -> AsyncIterator[list[EventDelivery]]:
        """Yield the deliveries of a window, newest first; with `every`, in any status."""
        wanted = DeliveryFilter(
            caller=caller,
            status=None if every else window.status,
            since=window.since,
            until=window.until,
        )
        while True:
            page = await self._log.list_deliveries(wanted, limit=_PAGE)
            yield page
            if len(page) < _PAGE:
                return
            wanted = msgspec.structs.replace(wanted, before=page[-1].delivery_id)

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
