"""Send events to the receivers of webhooks: begin due deliveries, and end their attempts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue, log_failure
from conveyor.domain.api_keys import UnsealError
from conveyor.domain.deliveries import (
    DELIVERED,
    AttemptResult,
    DeliveryStatus,
    EventDelivery,
    begin_attempt,
    dropped,
    end_attempt,
    interrupted,
    put_off,
)
from conveyor.domain.delivery_places import (
    MOST_OF_A_CALLER,
    DeliveryLine,
    Place,
    Places,
    WaitingDelivery,
)
from conveyor.domain.model import JobStatus, RunStatus
from conveyor.domain.urls import host_of
from conveyor.domain.webhooks import Webhook
from conveyor.ports.clock import Clock
from conveyor.ports.deliveries import DeliveryQueue
from conveyor.ports.handler import AttemptObserver
from conveyor.ports.records import JobLookup, RunLookup
from conveyor.ports.tracing import NO_TRACER, Tracer
from conveyor.ports.webhooks import WebhookAnswer, Webhooks
from conveyor.records.signed_events import KEY_UNREADABLE, EventSigner, cut_signatures

PAGE = 100
"""Deliveries read at a time; a look goes on while there are as many."""
SIDE_BY_SIDE = 20
"""Jobs read, and deliveries put off, at a time."""
LONGEST_LOOK = 30.0
"""Seconds after which a look leaves the rest to the next one. Its deliveries are due by its
begin: one that it puts off is not met again in it. With LEASE it is less than the longest lease."""
LEASE = 60.0
"""Seconds that a delivery stays with a worker that may have died."""
PUT_OFF = 5.0
"""Seconds by which a delivery without a place is put off, more or less by half. They grow with the
number of those that wait for the host, up to LONGEST_PUT_OFF."""
LONGEST_PUT_OFF = 120.0
FAULT = "transport_error:internal"
"""The failure of an attempt that a fault of Conveyor has ended."""

_log = logging.getLogger("conveyor.handlers")


@dataclass(frozen=True, slots=True)
class _Sending:
    """A delivery that has a place, and the webhook as it stood when it got it."""

    delivery: EventDelivery
    place: Place
    webhook: Webhook


class _Left(NamedTuple):
    """A delivery that is put off or dropped, as it is and as it will be. `place` is the one that it
    waits for, if it waits for one."""

    before: EventDelivery
    after: EventDelivery
    place: Place | None = None


class _Receiver(NamedTuple):
    """The webhook of a job, and its number."""

    webhook: Webhook
    number: int


class _Unreadable:
    """Stands for the webhook of a job that could not be read."""


@dataclass(slots=True)
class _Look:
    """The finds of one look: deliveries, the webhooks of their jobs, of which those in `fresh` were
    read for the present page, and how many were put off of a caller to a host."""

    began: int
    met: set[tuple[str, str]] = field(default_factory=set)
    receivers: dict[str, _Receiver | _Unreadable | None] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    put_off: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPorts:
    """The roles that delivering uses."""

    deliveries: DeliveryQueue
    jobs: JobLookup
    runs: RunLookup
    webhooks: Webhooks
    signer: EventSigner
    tracer: Tracer = NO_TRACER


class Deliverer:
    """Makes the attempts of due deliveries. Any number of workers may do so at once.

    `oldest` is how many seconds before the latest look the longest due delivery was due; 0 if there
    was none.
    """

    def __init__(self, ports: DeliveryPorts, clock: Clock, *, observer: AttemptObserver) -> None:
        self.oldest = 0.0
        self._ports = ports
        self._clock = clock
        self._observer = observer
        self._places = Places()
        self._line = DeliveryLine()
        self._under_way: set[tuple[str, str]] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Begin no further attempt."""
        self._is_stopping = True

    async def look(self, group: TaskGroup) -> None:
        """Start an attempt, in the group, of every due delivery that has a place, and put the
        others off. Wait for no attempt."""
        if self._places.is_idle():
            # No attempt will end that another could follow.
            self._line.clear()
        look, is_first = _Look(self._clock.now()), True
        while not self._is_stopping and self._clock.now() - look.began <= LONGEST_LOOK * 1_000:
            due = await self._ports.deliveries.due_deliveries(now=look.began, limit=PAGE)
            if is_first:
                self.oldest = max(0.0, (look.began - due[0].due_at) / 1_000) if due else 0.0
            known = look.met | self._under_way
            fresh = [one for one in due if _key(one) not in known]
            look.met.update(map(_key, fresh))
            await self._page(group, look, fresh)
            if len(due) < PAGE or not fresh:
                return
            is_first = False

    async def _page(self, group: TaskGroup, look: _Look, due: Sequence[EventDelivery]) -> None:
        """Start the attempts of a page, put off those without a place, and drop those that are no
        longer owed."""
        look.fresh.clear()
        unread = {one.job_id for one in due if one.job_id not in look.receivers}
        await for_each(partial(self._read, look), sorted(unread), limit=SIDE_BY_SIDE)
        left: list[_Left] = []
        for delivery in due:
            if self._is_stopping:
                break
            left += await self._place(group, look, delivery)
        await for_each(self._leave, left, limit=SIDE_BY_SIDE)
        for _, after, place in left:
            if place is not None:
                self._line.join(WaitingDelivery(after.delivery_id, place, after.version))
        self._start_waiting(group)

    async def _read(self, look: _Look, job_id: str) -> None:
        """Read the webhook of a job."""
        look.receivers[job_id] = _Unreadable()
        look.fresh.add(job_id)
        failed = f"reading the job {job_id} failed"
        await log_and_continue(_log, failed, partial(self._note_receiver, look, job_id))

    async def _note_receiver(self, look: _Look, job_id: str) -> None:
        look.receivers[job_id] = await self._receiver(job_id)

    async def _receiver(self, job_id: str) -> _Receiver | None:
        """Return the webhook of a job; None if there is none, or no such job."""
        job = await self._ports.jobs.find_job(job_id)
        if job is None or job.status is JobStatus.DELETED or job.webhook is None:
            return None
        return _Receiver(job.webhook, job.webhook_number)

    async def _place(self, group: TaskGroup, look: _Look, delivery: EventDelivery) -> list[_Left]:
        """Start the attempt of a delivery if it has a place; else return what becomes of it."""
        receiver = look.receivers[delivery.job_id]
        if delivery.job_id not in look.fresh and not self._is_full(delivery, receiver):
            # What is sent or dropped goes by the webhook as it stands, not as it was before.
            await self._read(look, delivery.job_id)
            receiver = look.receivers[delivery.job_id]
        if isinstance(receiver, _Unreadable):
            # Later, so that it stands in the way of no other.
            return [_Left(delivery, self._put_off(delivery, waiting=0))]
        webhook = _webhook_for(delivery, receiver)
        if webhook is None:
            return [_Left(delivery, dropped(delivery, now=self._clock.now()))]
        place = _place_of(delivery, webhook)
        if self._places.take(place):
            self._line.leave(place, delivery.delivery_id)
            group.start_soon(self._send_on, group, _Sending(delivery, place, webhook))
            return []
        line = (place.caller, place.host)
        waiting = max(self._line.length(place), look.put_off[line])
        look.put_off[line] += 1
        return [_Left(delivery, self._put_off(delivery, waiting=waiting), place)]

    def _is_full(self, delivery: EventDelivery, receiver: _Receiver | _Unreadable | None) -> bool:
        """Return whether a delivery can but wait."""
        if isinstance(receiver, _Unreadable):
            return True
        webhook = _webhook_for(delivery, receiver)
        return webhook is not None and not self._places.is_free(_place_of(delivery, webhook))

    def _put_off(self, delivery: EventDelivery, *, waiting: int) -> EventDelivery:
        """Make a delivery due later, the more of them wait."""
        now = self._clock.now()
        delay = min(PUT_OFF * (1 + waiting / MOST_OF_A_CALLER), LONGEST_PUT_OFF)
        due_at = now + round(delay * (0.5 + self._clock.random()) * 1_000)
        return put_off(delivery, due_at=due_at, now=now)

    async def _leave(self, left: _Left) -> None:
        """Write what becomes of a delivery without an attempt."""
        await log_and_continue(
            _log,
            f"changing the delivery {left.before.delivery_id} failed",
            partial(self._ports.deliveries.change_delivery, left.before, left.after),
        )

    def _start_waiting(self, group: TaskGroup) -> None:
        """Start the attempts of those that wait, each in its turn, while there are places."""
        while not self._is_stopping:
            waiting = self._line.take_next(self._places)
            if waiting is None:
                return
            group.start_soon(self._follow, group, waiting)

    async def _follow(self, group: TaskGroup, waiting: WaitingDelivery) -> None:
        """Make the attempt of a delivery that has waited for its place."""
        owed = None
        try:
            owed = await log_and_continue(
                _log,
                f"looking at the delivery {waiting.delivery_id} failed",
                partial(self._still_owed, waiting),
            )
        finally:
            self._places.give_back(waiting.place)
        if owed is not None and not self._is_stopping:
            delivery, webhook = owed
            # The place that it has just had, unless the webhook has another URL by now.
            place = _place_of(delivery, webhook)
            if self._places.take(place):
                await self._send_on(group, _Sending(delivery, place, webhook))
                return
            self._line.join(waiting._replace(place=place))
        self._start_waiting(group)

    async def _still_owed(self, waiting: WaitingDelivery) -> tuple[EventDelivery, Webhook] | None:
        """Read a delivery and its webhook; return None if somebody has changed it meanwhile, or it
        is no longer owed."""
        log = self._ports.deliveries
        found = await log.get_delivery(waiting.place.caller, waiting.delivery_id)
        if found is None or found.version != waiting.version:
            return None
        webhook = _webhook_for(found, await self._receiver(found.job_id))
        if webhook is None:
            await self._drop(found)
            return None
        return found, webhook

    async def _send_on(self, group: TaskGroup, sending: _Sending) -> None:
        """Make an attempt, and give its place to those that wait for one."""
        key = _key(sending.delivery)
        self._under_way.add(key)
        failed = f"the delivery {sending.delivery.delivery_id} failed"
        try:
            await log_and_continue(_log, failed, partial(self._attempt, sending))
        finally:
            self._under_way.discard(key)
            self._places.give_back(sending.place)
        self._start_waiting(group)

    async def _drop(self, delivery: EventDelivery) -> None:
        after = dropped(delivery, now=self._clock.now())
        await self._ports.deliveries.change_delivery(delivery, after)

    async def _attempt(self, sending: _Sending) -> None:
        ports, delivery, webhook = self._ports, sending.delivery, sending.webhook
        run = await ports.runs.get_run(delivery.caller, delivery.job_id, delivery.run_id)
        if run is None or run.status is RunStatus.DELETED:
            await self._drop(delivery)
            return
        headers, problem = await self._headers(delivery, webhook)
        now = self._clock.now()
        begun = begin_attempt(delivery, now=now, lapses_at=now + round(LEASE * 1_000))
        if not await ports.deliveries.change_delivery(delivery, begun):
            return
        trace = ports.tracer.begin("delivery", delivery.delivery_id, started_at=now)
        if trace is not None:
            trace.link(run.traceparent or "")
        began = self._clock.monotonic()
        try:
            result = problem or await self._post(delivery, webhook.url, headers)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                after = interrupted(begun, now=self._clock.now())
                await ports.deliveries.change_delivery(begun, after)
            raise
        with anyio.CancelScope(shield=True):
            seconds = self._clock.monotonic() - began
            self._places.note(sending.place, delivered=not result.error, seconds=seconds)
            posted_at = self._clock.now()
            await self._end(begun, result)
            if trace is not None:
                trace.part("post", now, posted_at)
                trace.part("note", posted_at, self._clock.now())
                attributes = _trace_attributes(begun, result)
                trace.end(self._clock.now(), attributes, failed=bool(result.error))

    async def _headers(
        self, delivery: EventDelivery, webhook: Webhook
    ) -> tuple[dict[str, str], AttemptResult | None]:
        """Return the headers of the next attempt; or its failure, if it cannot be signed."""
        try:
            headers = await self._ports.signer.headers(
                delivery.caller,
                delivery.body,
                event_id=delivery.delivery_id,
                attempt=delivery.attempt_count + 1,
                signed=webhook.signature,
                replay=delivery.ladder > 1,
            )
        except UnsealError as error:
            _log.error("the delivery %s was not signed: %s", delivery.delivery_id, error)
            return {}, AttemptResult(error=KEY_UNREADABLE, host=host_of(webhook.url))
        return headers, None

    async def _post(
        self, delivery: EventDelivery, url: str, headers: dict[str, str]
    ) -> AttemptResult:
        """Post an event, and return what came of it; a fault of Conveyor is a failure, too."""
        answer = await log_and_continue(
            _log,
            f"posting the delivery {delivery.delivery_id} failed",
            partial(self._ports.webhooks.post_event, url, headers=headers, body=delivery.body),
        )
        if answer is None:
            answer = WebhookAnswer(error=FAULT, host=host_of(url))
        return AttemptResult(
            error=answer.error,
            milliseconds=answer.milliseconds,
            host=answer.host,
            status=answer.status,
            content_type=answer.content_type,
            length=answer.length,
            retry_after=answer.retry_after,
            headers=cut_signatures(headers),
        )

    async def _end(self, begun: EventDelivery, result: AttemptResult) -> None:
        """Write the end of an attempt; if that cannot be stored, its outcome alone. An attempt
        without an end would be followed by another one for ever."""
        self._observer.webhook_attempted(result.error.partition(":")[0] or DELIVERED)
        try:
            await self._write_end(begun, result)
        except Exception as error:
            failed = f"storing an attempt of the delivery {begun.delivery_id} failed"
            log_failure(_log, failed, error)
            bare = AttemptResult(
                error=result.error,
                milliseconds=result.milliseconds,
                status=result.status,
                retry_after=result.retry_after,
            )
            await self._write_end(begun, bare)

    async def _write_end(self, begun: EventDelivery, result: AttemptResult) -> None:
        """Write the end of an attempt, though the delivery may have been replayed meanwhile."""
        number, ladder, random = begun.attempt_count, begun.ladder, self._clock.random()
        current: EventDelivery | None = begun
        while current is not None:
            now = self._clock.now()
            after = end_attempt(current, number, ladder, result, now=now, random=random)
            if await self._ports.deliveries.change_delivery(current, after):
                _tell(after, result)
                return
            current = await self._ports.deliveries.get_delivery(begun.caller, begun.delivery_id)


def _trace_attributes(begun: EventDelivery, result: AttemptResult) -> dict[str, str | int]:
    """Describe an attempt that has ended: ids, the host, the outcome."""
    return {
        "delivery_id": begun.delivery_id,
        "job_id": begun.job_id,
        "run_id": begun.run_id,
        "attempt": begun.attempt_count,
        "host": result.host or "",
        "outcome": result.error.partition(":")[0] or DELIVERED,
    }


def _key(delivery: EventDelivery) -> tuple[str, str]:
    return delivery.caller, delivery.delivery_id


def _webhook_for(delivery: EventDelivery, receiver: _Receiver | None) -> Webhook | None:
    """Return the webhook that a delivery is for; None if it is gone, though another one may have
    been set since, or does not ask for such events any more."""
    if receiver is None or receiver.number != delivery.webhook_number:
        return None
    return receiver.webhook if delivery.event_type in receiver.webhook.events else None


def _place_of(delivery: EventDelivery, webhook: Webhook) -> Place:
    return Place(delivery.caller, host_of(webhook.url), webhook.url)


def _tell(delivery: EventDelivery, result: AttemptResult) -> None:
    """Log a failure. The URL is not named: it may hold a secret."""
    if delivery.status is DeliveryStatus.FAILED:
        _log.warning(
            "gave up the delivery %s to %s: %s", delivery.delivery_id, result.host, result.error
        )
    elif result.error:
        _log.info(
            "an attempt of the delivery %s to %s failed: %s",
            delivery.delivery_id,
            result.host,
            result.error,
        )
