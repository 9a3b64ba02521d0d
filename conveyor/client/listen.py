"""Hand the events in the log of deliveries on to a receiver that the server need not reach.

The newest page of the log is read each second, all of the window each WHOLE_EVERY seconds: an event
that was made long ago may be replayed, and one that is written late lies below newer ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import NoReturn

from conveyor.client.api import TRANSIENT, Api, ClientClock
from conveyor.client.commands import ServerTarget, Terminal, existing_job
from conveyor.client.errors import ClientError, ServerRefused, ServerUnreachable
from conveyor.client.jobs import find_job
from conveyor.client.output import printable, to_the_second
from conveyor.client.receiver import PostOutcome, Receiver
from conveyor.client.webhooks import PAGE, LogFilter, newest_deliveries
from conveyor.client.wire import DeliveryReply
from conveyor.domain.errors import ErrorCode
from conveyor.domain.text_rules import rfc3339

PAGE_EVERY = 1.0
WHOLE_EVERY = 15.0
"""Seconds between two readings."""
WINDOW = 3 * 86_400_000
"""Milliseconds for which replays of an event are looked for, at the least: as long as its server
may try to deliver it."""
MOST_LISTED = 10_000
"""Deliveries that one reading lists."""
TRIES = 5
"""Times that an event is posted, at the most, to a receiver that does not take it."""
FIRST_PAUSE = 0.5
"""Seconds before the second try; each later pause is twice as long."""
POST_SECONDS = 15.0
EVENT_SECONDS = 20.0
"""Seconds for one try, and for all the tries of an event: meanwhile the others wait."""
LEAST_SECONDS = 1.0
"""Seconds that a try has, however long the server took to sign the event."""
DROPPED = "dropped"


class Listener:
    """Posts each event of the log to one receiver, once for each time that it is sent or replayed.

    `job` limits it to one job. What was sent before `since`, by default before now, is passed over.
    """

    def __init__(
        self,
        target: ServerTarget,
        api: Api,
        terminal: Terminal,
        receiver: Receiver,
        *,
        job: str | None,
        since: str | None,
    ) -> None:
        self.handed_on = 0
        self._target = target
        self._api = api
        self._terminal = terminal
        self._receiver = receiver
        self._job = job
        self._job_id: str | None = None
        self._since = since
        now = api.pace.now()
        self._mark = since or rfc3339(now)
        self._window = WINDOW if since is None else max(WINDOW, now - _instant(since))
        self._ladders: dict[str, int] = {}
        self._name_way_back(self._mark)

    async def begin(self) -> None:
        """Find the job, and read what is passed over. Raises ClientError if there is no such
        job."""
        try:
            if self._job is not None:
                found = await find_job(self._api, self._job)
                if (await existing_job(self._api, found)).webhook is None:
                    hint = self._target.command("webhook", "set", found, "URL")
                    self._terminal.warn(
                        f"job {printable(found)} has no webhook, so it has no events: {hint}"
                    )
                self._job = self._job_id = found
            deliveries = await self._read(whole=True)
        except (ServerUnreachable, ServerRefused):
            # What comes before the server is back is new.
            self._since = self._mark
            raise
        for delivery in deliveries:
            if self._since is None or _moment(delivery) < self._since:
                self._ladders[delivery.delivery_id] = delivery.ladder
        if self._since is not None and len(deliveries) == MOST_LISTED:
            self._terminal.warn(f"only the newest {MOST_LISTED:,} events are looked at")

    async def look(self, *, whole: bool) -> None:
        """Read the newest page of the log, or all of its window, and hand on what is new.

        Where a whole page is new, the older ones are read too: the oldest event comes first.
        """
        await self._hand_on(await self._read(whole=whole))

    async def _read(self, *, whole: bool) -> list[DeliveryReply]:
        earliest = rfc3339(max(0, self._api.pace.now() - self._window))
        wanted = LogFilter(None, min(earliest, self._since or earliest), MOST_LISTED)
        read: list[DeliveryReply] = []
        meets_known = False
        try:
            async with aclosing(newest_deliveries(self._api, self._job_id, wanted)) as found:
                async for delivery in found:
                    read.append(delivery)
                    meets_known = meets_known or delivery.delivery_id in self._ladders
                    if meets_known and not whole and len(read) % PAGE == 0:
                        break
        except ServerRefused as refusal:
            if self._job_id is None or refusal.code != ErrorCode.NOT_FOUND:
                raise
            raise ClientError(
                f"job {printable(self._job_id)} was deleted: it has no more events"
            ) from None
        return read

    async def _hand_on(self, deliveries: list[DeliveryReply]) -> None:
        new = [one for one in deliveries if one.ladder > self._ladders.get(one.delivery_id, 0)]
        # Ids grow with the ends of runs; replays come after what is sent for the first time.
        new.sort(key=lambda one: (one.replayed_at or "", one.delivery_id))
        # The order of ids is not quite that of moments: an interrupted listener comes back to the
        # oldest moment that is left.
        oldest_left = list(accumulate(map(_moment, reversed(new)), min))
        for delivery in new:
            self._name_way_back(min(self._mark, oldest_left.pop()))
            if delivery.status != DROPPED:
                await self._post(delivery)
            self._ladders[delivery.delivery_id] = delivery.ladder
            self._mark = _moment(delivery)
            self._name_way_back(min(self._mark, *oldest_left[-1:]) if oldest_left else self._mark)

    def _name_way_back(self, since: str) -> None:
        only = () if self._job is None else ("--job", self._job)
        words = ("listen", "--forward-to", self._receiver.url, *only, "--since", since)
        self._terminal.farewell = f"interrupted; come back with: {self._target.command(*words)}"

    async def _post(self, delivery: DeliveryReply) -> None:
        """Post an event, a bounded number of times and for a bounded time, and tell what came of
        it."""
        shown = f"{printable(delivery.event_type):<13}  {printable(delivery.delivery_id)}"
        pace, pause = self._api.pace, FIRST_PAUSE
        deadline = pace.monotonic() + EVENT_SECONDS
        for number in range(1, TRIES + 1):
            try:
                outcome = await self._try(delivery.delivery_id, deadline)
            except ServerRefused as refusal:
                if refusal.code != ErrorCode.NOT_FOUND:
                    raise
                self._terminal.warn(f"{shown}  gone before it was handed on")
                return
            self._tell(delivery, shown, outcome, number)
            if outcome.taken:
                self.handed_on += 1
                return
            if number == TRIES or pace.monotonic() + pause >= deadline:
                break
            await pace.sleep(pause)
            pause *= 2
        again = self._target.command("webhook", "replay", delivery.delivery_id)
        tries = "one try" if number == 1 else f"{number} tries"
        self._terminal.warn(f"gave up after {tries}; to have it again: {again}")

    async def _try(self, delivery_id: str, deadline: float) -> PostOutcome:
        """Post an event once. Its headers are fresh, since signatures age."""
        body = (await self._api.delivery(delivery_id)).body.encode()
        try:
            headers = await self._api.delivery_headers(delivery_id)
        except ServerRefused as refusal:
            if refusal.code == ErrorCode.NOT_FOUND:
                raise
            # Such as a key that the server cannot open: later events may fare better.
            return PostOutcome(None, str(refusal))
        left = deadline - self._api.pace.monotonic()
        seconds = max(LEAST_SECONDS, min(POST_SECONDS, left))
        return await self._receiver.post(headers, body, seconds=seconds)

    def _tell(self, delivery: DeliveryReply, shown: str, outcome: PostOutcome, number: int) -> None:
        made = to_the_second(delivery.created_at)[11:]
        replayed = ", replayed" if delivery.ladder > 1 else ""
        self._terminal.say(f"{made}  {shown}  {outcome.words}{replayed}")
        self._terminal.give(
            {
                "delivery_id": delivery.delivery_id,
                "job_id": delivery.job_id,
                "run_id": delivery.run_id,
                "event_type": delivery.event_type,
                "ladder": delivery.ladder,
                "try": number,
                "status_code": outcome.status,
                "error": None if outcome.taken else outcome.words,
            }
        )


async def listen(
    target: ServerTarget, terminal: Terminal, url: str, *, job: str | None, since: str | None
) -> NoReturn:
    """Hand events on until interrupted. A server that is away is waited for.

    Raises ClientError.
    """
    async with target.connect(terminal) as api, aclosing(Receiver(url)) as receiver:
        listener = Listener(target, api, terminal, receiver, job=job, since=since)
        await _insist(listener.begin, terminal, target.pace)
        terminal.warn(
            f"listening to {printable(api.address)} for {printable(url)}: events of jobs that have "
            "a webhook (conveyor submit … --webhook URL); Ctrl-C ends it"
        )
        whole_at = target.pace.monotonic()
        while True:
            whole = target.pace.monotonic() >= whole_at
            await _insist(partial(listener.look, whole=whole), terminal, target.pace)
            if whole:
                whole_at = target.pace.monotonic() + WHOLE_EVERY
            await target.pace.sleep(PAGE_EVERY)


async def _insist(
    step: Callable[[], Awaitable[None]], terminal: Terminal, pace: ClientClock
) -> None:
    """Take a step anew until the server is there for it."""
    is_told = False
    while True:
        try:
            return await step()
        except (ServerUnreachable, ServerRefused) as error:
            if isinstance(error, ServerRefused) and not _is_passing(error):
                raise
            if not is_told:
                terminal.warn(f"{error}; trying again")
            is_told = True
        await pace.sleep(PAGE_EVERY)


def _is_passing(refusal: ServerRefused) -> bool:
    return refusal.status in TRANSIENT or refusal.status >= 500


def _moment(delivery: DeliveryReply) -> str:
    """Return the instant at which a delivery was last made or replayed."""
    return max(delivery.created_at, delivery.replayed_at or "")


def _instant(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)
