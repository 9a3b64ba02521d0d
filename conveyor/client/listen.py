"""Hand the events in the log of deliveries on to a receiver that the server need not reach.

The newest page of the log is read each second, all of the window each WHOLE_EVERY seconds: an event
that was made long ago may be replayed, and one that is written late lies below newer ones.
"""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime
from typing import NoReturn

import httpx

from conveyor import __version__
from conveyor.client.api import TRANSIENT, Api, ClientClock
from conveyor.client.commands import ServerTarget, Terminal
from conveyor.client.errors import ClientError, ServerRefused, ServerUnreachable
from conveyor.client.jobs import find_job
from conveyor.client.output import command, printable, to_the_second
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
"""Times that an event is posted to a receiver that does not take it."""
FIRST_PAUSE = 0.5
"""Seconds before the second try; each later pause is twice as long."""
POST_SECONDS = 15.0
DROPPED = "dropped"


class Listener:
    """Posts each event of the log to one receiver, once for each time that it is sent or replayed.

    `job_id` limits it to one job.
    """

    def __init__(
        self,
        api: Api,
        terminal: Terminal,
        receiver: Receiver,
        *,
        job_id: str | None,
    ) -> None:
        self.handed_on = 0
        self._api = api
        self._terminal = terminal
        self._receiver = receiver
        self._job_id = job_id
        self._ladders: dict[str, int] = {}
        self._window = WINDOW

    async def begin(self, since: str | None) -> None:
        """Read the log. Pass over what was sent before `since`, by default before now, and hand on
        the rest."""
        now = self._api.pace.now()
        found = await self._read(MOST_LISTED, since=since)
        later = []
        for delivery in found:
            if since is not None and max(delivery.created_at, delivery.replayed_at or "") >= since:
                later.append(delivery)
            else:
                self._ladders[delivery.delivery_id] = delivery.ladder
        if since is not None:
            self._window = max(WINDOW, now - _instant(since))
        await self._hand_on(later)

    async def look(self, *, whole: bool) -> None:
        """Read the newest page of the log, or all of its window, and hand on what is new."""
        await self._hand_on(await self._read(MOST_LISTED if whole else PAGE))

    async def _read(self, limit: int, *, since: str | None = None) -> list[DeliveryReply]:
        earliest = rfc3339(max(0, self._api.pace.now() - self._window))
        wanted = LogFilter(None, min(earliest, since or earliest), limit)
        async with aclosing(newest_deliveries(self._api, self._job_id, wanted)) as found:
            return [delivery async for delivery in found]

    async def _hand_on(self, deliveries: list[DeliveryReply]) -> None:
        new = [one for one in deliveries if one.ladder > self._ladders.get(one.delivery_id, 0)]
        # Ids grow with the ends of runs; replays come after what is sent for the first time.
        for delivery in sorted(new, key=lambda one: (one.replayed_at or "", one.delivery_id)):
            if delivery.status != DROPPED:
                await self._post(delivery)
            self._ladders[delivery.delivery_id] = delivery.ladder

    async def _post(self, delivery: DeliveryReply) -> None:
        """Post an event, a bounded number of times, and tell what came of it."""
        shown = f"{printable(delivery.event_type):<13}  {printable(delivery.delivery_id)}"
        pause = FIRST_PAUSE
        for number in range(1, TRIES + 1):
            try:
                outcome = await self._try(delivery.delivery_id)
            except ServerRefused as refusal:
                if refusal.code == ErrorCode.NOT_FOUND:
                    self._terminal.warn(f"{shown}  gone before it was handed on")
                    return
                # Such as a key that the server cannot open: later events may fare better.
                outcome = PostOutcome(None, str(refusal))
            self._tell(delivery, shown, outcome, number)
            if outcome.taken:
                self.handed_on += 1
                return
            if number < TRIES:
                await self._api.pace.sleep(pause)
                pause *= 2
        again = command("webhook", "replay", delivery.delivery_id)
        self._terminal.warn(f"gave up after {TRIES} tries; to have it again: {again}")

    async def _try(self, delivery_id: str) -> PostOutcome:
        """Post an event once. Its headers are fresh, since signatures age."""
        body = (await self._api.delivery(delivery_id)).body.encode()
        return await self._receiver.post(await self._api.delivery_headers(delivery_id), body)

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


class PostOutcome:
    """What came of a request to the receiver: the status of its answer, None without one."""

    def __init__(self, status: int | None, error: str = "") -> None:
        self.status = status
        self.taken = status is not None and 200 <= status < 300
        self.words = error or str(status)


class Receiver:
    """A receiver of events. Raises ClientError for an address that is none."""

    def __init__(self, url: str) -> None:
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL("")
        if address.scheme not in ("http", "https") or not address.host:
            raise ClientError(f"not an http or https URL: {printable(url)}")
        self._address = address
        self._client = httpx.AsyncClient(
            timeout=POST_SECONDS, verify=address.scheme == "https", trust_env=False
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def post(self, headers: dict[str, str], body: bytes) -> PostOutcome:
        """Post an event without following redirects."""
        usual = {"Content-Type": "application/json", "User-Agent": f"conveyor/{__version__}"}
        try:
            answer = await self._client.post(
                self._address, content=body, headers={**usual, **headers}
            )
        except httpx.TimeoutException:
            return PostOutcome(None, f"no answer for {POST_SECONDS:g} s")
        except httpx.RequestError as error:
            return PostOutcome(None, printable(str(error) or type(error).__name__))
        return PostOutcome(answer.status_code)


async def listen(
    target: ServerTarget, terminal: Terminal, url: str, *, job: str | None, since: str | None
) -> int:
    """Hand events on until interrupted. A server that is away for a while is waited for.

    Raises ClientError.
    """
    receiver = Receiver(url)
    async with target.connect(terminal) as api, aclosing(receiver):
        job_id = None if job is None else await find_job(api, job)
        listener = Listener(api, terminal, receiver, job_id=job_id)
        terminal.farewell = "interrupted; what comes meanwhile is handed on later with --since"
        terminal.warn(f"listening to {printable(api.address)} for {printable(url)}; Ctrl-C ends it")
        await listener.begin(since)
        await _follow(listener, terminal, target.pace)


async def _follow(listener: Listener, terminal: Terminal, pace: ClientClock) -> NoReturn:
    whole_at, is_away = pace.monotonic() + WHOLE_EVERY, False
    while True:
        await pace.sleep(PAGE_EVERY)
        whole = pace.monotonic() >= whole_at
        try:
            await listener.look(whole=whole)
        except (ServerUnreachable, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.status not in TRANSIENT:
                raise
            if not is_away:
                terminal.warn(f"{error}; trying again")
            is_away = True
            continue
        is_away = False
        if whole:
            whole_at = pace.monotonic() + WHOLE_EVERY


def _instant(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)
