"""Send events to the receivers of webhooks: begin due deliveries, and end their attempts."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from conveyor.aio.resilience import log_and_continue
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
from conveyor.domain.model import JobStatus, RunStatus
from conveyor.domain.urls import host_of
from conveyor.domain.webhooks import Webhook
from conveyor.ports.clock import Clock
from conveyor.ports.deliveries import DeliveryQueue
from conveyor.ports.handler import AttemptObserver
from conveyor.ports.records import JobLookup, RunLookup
from conveyor.ports.webhooks import Webhooks
from conveyor.records.signed_events import KEY_UNREADABLE, EventSigner, cut_signatures

PAGE = 100
"""Deliveries read at a time; a look goes on while there are as many."""
MOST_AT_A_TIME = 20
"""Attempts of a worker under way."""
MOST_OF_A_CALLER = 4
"""Attempts under way of one caller to one host."""
MOST_TO_A_HOST = 8
"""Attempts under way to one host."""
FAILING_AFTER = 20
"""Failures in a row of one caller at one URL after which one attempt at a time goes there."""
MOST_REMEMBERED = 10_000
"""URLs whose failures are counted; those that failed longest ago are forgotten first."""
MOST_WAITING = 100
"""Deliveries to one host that follow as soon as an attempt to it has ended. Others are found by a
later look."""
LEASE = 60.0
"""Seconds that a delivery stays with a worker that may have died."""
PUT_OFF = 5.0
"""Seconds by which a delivery without a place is put off, more or less by half. They grow with the
number of those that wait for the host, up to LONGEST_PUT_OFF."""
LONGEST_PUT_OFF = 120.0

_log = logging.getLogger("conveyor.handlers")


class Place(NamedTuple):
    """What an attempt takes up: a caller's connection to a host, for a URL."""

    caller: str
    host: str
    url: str


class Places:
    """The attempts under way in one worker, and the URLs that keep failing."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[str, ...]] = Counter()
        self._failures: OrderedDict[tuple[str, str], int] = OrderedDict()

    def take(self, place: Place) -> bool:
        """Take a place; return False if it is full."""
        if not self.is_free(place):
            return False
        self._taken.update(_shares(place))
        return True

    def is_free(self, place: Place) -> bool:
        """Return whether one more attempt may go there."""
        host, caller, url = _shares(place)
        is_failing = self._failures.get((place.caller, place.url), 0) >= FAILING_AFTER
        return (
            self._taken[host] < MOST_TO_A_HOST
            and self._taken[caller] < MOST_OF_A_CALLER
            and not (is_failing and self._taken[url])
        )

    def is_busy(self, host: str) -> bool:
        """Return whether an attempt to a host is under way."""
        return self._taken[host,] > 0

    def give_back(self, place: Place) -> None:
        """Give a place back."""
        self._taken.subtract(_shares(place))
        for share in _shares(place):
            if not self._taken[share]:
                del self._taken[share]

    def note(self, place: Place, *, delivered: bool) -> None:
        """Note the outcome of an attempt."""
        url = (place.caller, place.url)
        failures = self._failures.pop(url, 0) + 1
        if not delivered:
            self._failures[url] = failures
        if len(self._failures) > MOST_REMEMBERED:
            self._failures.popitem(last=False)


def _shares(place: Place) -> tuple[tuple[str, ...], ...]:
    """Return what is counted: attempts to the host, of the caller to it, and to the URL."""
    caller, host, url = place
    return (host,), (caller, host), (caller, host, url)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A delivery that has a place, and the webhook as it stood when it got it."""

    delivery: EventDelivery
    place: Place
    webhook: Webhook


class _Waiting(NamedTuple):
    """A delivery that was put off: the place that it had none of, and its version since."""

    place: Place
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPorts:
    """The roles that delivering uses."""

    deliveries: DeliveryQueue
    jobs: JobLookup
    runs: RunLookup
    webhooks: Webhooks
    signer: EventSigner


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
        self._slots = anyio.Semaphore(MOST_AT_A_TIME)
        self._waiting: dict[str, dict[str, _Waiting]] = {}
        self._is_stopping = False

    def stop(self) -> None:
        """Begin no further attempt."""
        self._is_stopping = True

    async def look(self, group: TaskGroup) -> None:
        """Start an attempt, in the group, of every due delivery that has a place, and put the
        others off. Wait only while MOST_AT_A_TIME attempts are under way."""
        # Where no attempt is under way, none will end that another could follow.
        for host in [host for host in self._waiting if not self._places.is_busy(host)]:
            del self._waiting[host]
        before: list[EventDelivery] | None = None
        while not self._is_stopping:
            now = self._clock.now()
            due = await self._ports.deliveries.due_deliveries(now=now, limit=PAGE)
            if before is None:
                self.oldest = max(0.0, (now - due[0].due_at) / 1_000) if due else 0.0
            for delivery in due:
                if not self._is_stopping:
                    await self._start(group, delivery)
            if len(due) < PAGE or due == before:
                return
            before = due

    async def _start(self, group: TaskGroup, delivery: EventDelivery) -> None:
        await self._slots.acquire()
        sending = None
        try:
            sending = await self._alone(delivery)
        finally:
            if sending is None:
                self._slots.release()
        if sending is not None:
            group.start_soon(self._send_on, sending)

    async def _alone(self, delivery: EventDelivery) -> _Sending | None:
        return await log_and_continue(
            _log,
            f"looking at the delivery {delivery.delivery_id} failed",
            lambda: self._place(delivery),
        )

    async def _place(self, delivery: EventDelivery) -> _Sending | None:
        """Give a delivery a place; or drop it if it is no longer owed, or put it off."""
        job = await self._ports.jobs.find_job(delivery.job_id)
        if job is None or job.status is JobStatus.DELETED or job.webhook is None:
            await self._drop(delivery)
            return None
        url = job.webhook.url
        place = Place(delivery.caller, host_of(url), url)
        if self._is_stopping:
            return None
        if self._places.take(place):
            self._waiting.get(place.host, {}).pop(delivery.delivery_id, None)
            return _Sending(delivery, place, job.webhook)
        await self._put_off(delivery, place)
        return None

    async def _drop(self, delivery: EventDelivery) -> None:
        after = dropped(delivery, now=self._clock.now())
        await self._ports.deliveries.change_delivery(delivery, after)

    async def _put_off(self, delivery: EventDelivery, place: Place) -> None:
        waiting = self._waiting.setdefault(place.host, {})
        now = self._clock.now()
        delay = min(PUT_OFF * (1 + len(waiting) / MOST_OF_A_CALLER), LONGEST_PUT_OFF)
        due_at = now + round(delay * (0.5 + self._clock.random()) * 1_000)
        after = put_off(delivery, due_at=due_at, now=now)
        is_changed = await self._ports.deliveries.change_delivery(delivery, after)
        if is_changed and len(waiting) < MOST_WAITING:
            waiting[delivery.delivery_id] = _Waiting(place, after.version)

    async def _send_on(self, sending: _Sending | None) -> None:
        """Make an attempt, and then those that wait for a place at its host."""
        try:
            while sending is not None:
                host = sending.place.host
                await self._send(sending)
                sending = await self._next(host)
        finally:
            self._slots.release()

    async def _send(self, sending: _Sending) -> None:
        failed = f"the delivery {sending.delivery.delivery_id} failed"
        try:
            await log_and_continue(_log, failed, lambda: self._attempt(sending))
        finally:
            self._places.give_back(sending.place)

    async def _next(self, host: str) -> _Sending | None:
        """Return the first delivery that waits for the host and has a place now; forget those that
        somebody has changed meanwhile."""
        waiting = self._waiting.get(host, {})
        for delivery_id, known in list(waiting.items()):
            if self._is_stopping:
                return None
            if not self._places.is_free(known.place) or waiting.pop(delivery_id, None) is None:
                continue
            sending = await log_and_continue(
                _log,
                f"looking at the delivery {delivery_id} failed",
                partial(self._again, delivery_id, known),
            )
            if sending is not None:
                return sending
        return None

    async def _again(self, delivery_id: str, known: _Waiting) -> _Sending | None:
        found = await self._ports.deliveries.get_delivery(known.place.caller, delivery_id)
        if found is None or found.version != known.version:
            return None
        return await self._place(found)

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
        try:
            result = problem or await self._post(webhook.url, headers, delivery.body)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                after = interrupted(begun, now=self._clock.now())
                await ports.deliveries.change_delivery(begun, after)
            raise
        with anyio.CancelScope(shield=True):
            self._places.note(sending.place, delivered=not result.error)
            await self._end(begun, result)

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

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> AttemptResult:
        answer = await self._ports.webhooks.post_event(url, headers=headers, body=body)
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
        """Write the end of an attempt, though the delivery may have been replayed meanwhile."""
        self._observer.webhook_attempted(result.error.partition(":")[0] or DELIVERED)
        number, ladder, random = begun.attempt_count, begun.ladder, self._clock.random()
        current: EventDelivery | None = begun
        while current is not None:
            now = self._clock.now()
            after = end_attempt(current, number, ladder, result, now=now, random=random)
            if await self._ports.deliveries.change_delivery(current, after):
                _tell(after, result)
                return
            current = await self._ports.deliveries.get_delivery(begun.caller, begun.delivery_id)


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
