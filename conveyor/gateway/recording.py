"""The gateway port with a recording: write what another gateway answers, or answer from what was
written.

Both sides take the secrets out of a request before they compare or write anything, so a recording
fits whoever has other keys. An answer that holds what was taken out is withheld.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from urllib.parse import parse_qsl, urlsplit

import anyio
import msgspec
from anyio import to_thread

from conveyor.domain.model import Problem, TaskFailure
from conveyor.gateway.problems import too_large
from conveyor.gateway.redaction import Redacted, SecretNames, SecretScanner, redacted, usual_names
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import (
    Absence,
    Gateway,
    Postponed,
    ScrapeFailed,
    ScrapeRequest,
    Success,
)
from conveyor.ports.idle import OpenWork, turn
from conveyor.ports.recordings import (
    Asked,
    BodyDraft,
    Exchange,
    RecordedFailure,
    Recorder,
    Recordings,
    Verdict,
    Withheld,
)

SEARCHES = "searches for secrets"
NOT_RECORDED = "not_recorded"
MOST_HOSTS = 1_000
"""Hosts of withheld answers that are told apart."""
_MOST_DETAIL = 500
_QUICKLY_SEARCHED = 16_384
"""Bytes that are searched sooner than they are handed to a thread."""
_log = logging.getLogger("conveyor.gateway")


class RecordingGateway(Gateway):
    """A gateway that writes down each call of another, and closes it and the recording with itself.

    Calls go on if the recording cannot be written: then it ends, and is not whole.
    """

    def __init__(
        self,
        gateway: Gateway,
        recorder: Recorder,
        clock: Clock,
        names: Callable[[], SecretNames] = usual_names,
        work: OpenWork | None = None,
    ) -> None:
        self._gateway = gateway
        self._recorder = recorder
        self._clock = clock
        self._names = names
        self._work = work
        self._withheld = 0
        self._hosts: dict[str, None] = {}
        self.is_whole = True

    @property
    def withheld(self) -> Withheld:
        """Return how many answers were not recorded because a secret of the request stood in them,
        and their hosts."""
        return Withheld(self._withheld, tuple(self._hosts))

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._recorded(request)

    async def aclose(self) -> None:
        try:
            await self._gateway.aclose()
        finally:
            try:
                await self._recorder.aclose(is_whole=self.is_whole)
            except OSError as error:
                self._fail(error)

    @asynccontextmanager
    async def _recorded(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        call = _Call(redacted(request, self._names()), self._clock, self._work)
        watched: _WatchedBody | None = None
        try:
            async with self._gateway.scrape(request) as success:
                if isinstance(success.content, bytes):
                    await self._note_small(call, success, success.content)
                    yield success
                else:
                    watched = _WatchedBody(success.content, self, call, success)
                    yield msgspec.structs.replace(success, content=watched)
        except ScrapeFailed as failed:
            # What the store makes of a body is no answer of the gateway.
            if not call.has_answer and (watched is None or watched.broken is failed):
                await self._note_failure(call, failed)
            raise
        finally:
            if watched is not None:
                with anyio.CancelScope(shield=True):
                    await watched.draft.drop()

    async def _note_small(self, call: _Call, success: Success, body: bytes) -> None:
        call.has_answer = True
        if not self.is_whole:
            return
        is_clean = not call.is_told_by(success) and not await call.stands_in(body)
        try:
            if is_clean:
                await self._recorder.append(call.answered(success), body)
            else:
                await self._withhold(call)
        except OSError as error:
            self._fail(error)

    async def _note_failure(self, call: _Call, failed: ScrapeFailed) -> None:
        if not self.is_whole:
            return
        refusal = _refusal(failed)
        try:
            told = msgspec.json.encode(refusal).decode()
            if call.is_told_by(failed) or call.scanner.finds(told.encode()):
                await self._withhold(call)
                return
            verdict = Verdict.FAILED if refusal.waiting is None else Verdict.POSTPONED
            noted = call.exchange(verdict, refusal.problem.status)
            await self._recorder.append(
                msgspec.structs.replace(
                    noted, spend=failed.spend, sent=failed.sent, refusal=refusal
                )
            )
        except OSError as error:
            self._fail(error)

    async def _withhold(self, call: _Call) -> None:
        self._withheld += 1
        if len(self._hosts) < MOST_HOSTS:
            self._hosts[_host(call.redacted.asked.url)] = None
        await self._recorder.append(call.exchange(Verdict.SECRET_IN_ANSWER, 0))

    def _fail(self, error: OSError) -> None:
        if self.is_whole:
            self.is_whole = False
            _log.error(
                "the recording ends here; a new one is of no use: %s", error.strerror or error
            )

    async def add(self, draft: BodyDraft, piece: bytes) -> None:
        """Add a piece to a body, unless the recording has ended."""
        if not self.is_whole:
            return
        try:
            await draft.write(piece)
        except OSError as error:
            self._fail(error)

    async def end(self, call: _Call, success: Success, draft: BodyDraft, *, is_clean: bool) -> None:
        """Write down an answer whose body came in pieces."""
        call.has_answer = True
        if not self.is_whole:
            return
        try:
            if is_clean:
                noted = msgspec.structs.replace(call.answered(success), body=await draft.keep())
                await self._recorder.append(noted)
            else:
                await self._withhold(call)
        except OSError as error:
            self._fail(error)

    def draft(self) -> BodyDraft:
        """Begin a body."""
        return self._recorder.draft()


class _Call:
    """One call that is being recorded."""

    def __init__(self, without: Redacted, clock: Clock, work: OpenWork | None) -> None:
        self.redacted = without
        self.scanner: SecretScanner = without.scanner()
        self.has_answer = False
        self._clock = clock
        self._work = work
        self._began = clock.monotonic()

    def exchange(self, verdict: Verdict, status: int) -> Exchange:
        """Return what is written in any case."""
        asked = self.redacted.asked
        return Exchange(
            key=asked.key,
            verdict=verdict,
            status=status,
            ms=round((self._clock.monotonic() - self._began) * 1_000),
            order=asked.order,
            method=asked.method,
            url=asked.url,
            params=asked.params,
            posted=asked.body,
            masked=self.redacted.masked,
        )

    def answered(self, success: Success) -> Exchange:
        """Return what is written of a success, but for its body."""
        return msgspec.structs.replace(
            self.exchange(Verdict.OK, success.status),
            content_type=success.content_type,
            spend=success.spend,
            sent=success.sent,
        )

    def is_told_by(self, answer: Success | ScrapeFailed) -> bool:
        """Return whether a secret stands in the headers of an answer."""
        told = list(answer.headers.values()) if answer.headers is not None else []
        if isinstance(answer, Success):
            told.append(answer.content_type)
        text = "\n".join(told).encode("utf-8", "surrogateescape")
        return bool(text) and self.scanner.finds(text)

    async def stands_in(self, piece: bytes) -> bool:
        """Return whether a secret stands in the next piece of a body."""
        if len(piece) <= _QUICKLY_SEARCHED:
            return self.scanner.feed(piece)
        async with turn(self._work, SEARCHES):
            return await to_thread.run_sync(self.scanner.feed, piece)


class _WatchedBody(AsyncIterator[bytes]):
    """A body on its way to whoever reads it. It is recorded once it has been read to its end;
    `broken` is the failure that ended it."""

    def __init__(
        self,
        source: AsyncIterator[bytes],
        gateway: RecordingGateway,
        call: _Call,
        success: Success,
    ) -> None:
        self.draft = gateway.draft()
        self.broken: ScrapeFailed | None = None
        self._source = source
        self._gateway = gateway
        self._call = call
        self._success = success
        self._is_clean = not call.is_told_by(success)
        self._has_ended = False

    async def __anext__(self) -> bytes:
        try:
            piece = await anext(self._source)
        except StopAsyncIteration:
            await self._end()
            raise
        except ScrapeFailed as failed:
            self.broken = failed
            raise
        if self._is_clean and await self._call.stands_in(piece):
            self._is_clean = False
            await self.draft.drop()
        if self._is_clean:
            await self._gateway.add(self.draft, piece)
        return piece

    async def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        await self._gateway.end(self._call, self._success, self.draft, is_clean=self._is_clean)


def _refusal(failed: ScrapeFailed) -> RecordedFailure:
    absence = failed.absence
    return RecordedFailure(
        failed.problem,
        failed.failure,
        retryable=failed.retryable,
        retry_after=failed.retry_after,
        burns_attempt=failed.burns_attempt,
        account=failed.account,
        is_absent=absence is not None,
        shared=None if absence is None else absence.shared,
        waiting=failed.waiting if isinstance(failed, Postponed) else None,
        host=failed.refusal,
    )


class ReplayGateway(Gateway):
    """A gateway that answers from a recording. A call that is not recorded fails, or goes to
    another gateway, if there is one; it closes that and the recording with itself."""

    def __init__(
        self,
        recordings: Recordings,
        other: Gateway | None = None,
        names: Callable[[], SecretNames] = usual_names,
    ) -> None:
        self._recordings = recordings
        self._other = other
        self._names = names

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._replayed(request)

    async def rewind(self) -> None:
        """Begin again with the first answers."""
        await self._recordings.rewind()

    async def aclose(self) -> None:
        try:
            if self._other is not None:
                await self._other.aclose()
        finally:
            await self._recordings.aclose()

    @asynccontextmanager
    async def _replayed(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        without = redacted(request, self._names())
        asked = without.asked
        exchange = await self._find(without)
        async with AsyncExitStack() as held:
            if exchange is not None:
                yield await self._answer(request, exchange, held)
            elif self._other is not None:
                yield await held.enter_async_context(self._other.scrape(request))
            else:
                raise not_recorded(asked, await self._recordings.nearest(asked))

    async def _find(self, without: Redacted) -> Exchange | None:
        """Return the next exchange of a request, whichever secrets it was recorded with. One that
        stands in the rest of the request too is redacted there, and not in that of others."""
        order = without.asked.order
        for key in dict.fromkeys((without.asked.key, without.plain.key)):
            exchange = await self._recordings.following(key, order)
            if exchange is not None:
                return exchange
        other = await self._recordings.alike(without.plain)
        return None if other is None else await self._recordings.following(other, order)

    async def _answer(
        self, request: ScrapeRequest, exchange: Exchange, held: AsyncExitStack
    ) -> Success:
        if exchange.verdict is Verdict.SECRET_IN_ANSWER:
            raise _withheld()
        if exchange.refusal is not None:
            raise _failure(exchange, exchange.refusal)
        content, size = await held.enter_async_context(self._recordings.body(exchange.body))
        if size > request.max_bytes:
            raise too_large(request.max_bytes)
        return Success(
            content,
            exchange.content_type,
            exchange.spend,
            sent=exchange.sent,
            status=exchange.status,
        )


def _failure(exchange: Exchange, told: RecordedFailure) -> ScrapeFailed:
    failed: ScrapeFailed
    if told.waiting is not None:
        failed = Postponed(
            told.problem, told.failure, retry_after=told.retry_after, waiting=told.waiting
        )
    else:
        failed = ScrapeFailed(
            told.problem,
            told.failure,
            retryable=told.retryable,
            retry_after=told.retry_after,
            burns_attempt=told.burns_attempt,
            account=told.account,
            spend=exchange.spend,
        )
        failed.absence = Absence(told.shared) if told.is_absent else None
    failed.sent, failed.refusal = exchange.sent, told.host
    return failed


def _withheld() -> ScrapeFailed:
    title = "the answer was not recorded: something secret of its request stood in it"
    failed = ScrapeFailed(Problem(Verdict.SECRET_IN_ANSWER.value, title, 422), TaskFailure.OTHER)
    failed.sent = 0
    return failed


def not_recorded(asked: Asked, nearest: Exchange | None) -> ScrapeFailed:
    """Return the failure of a call that a recording does not have, which says what differs from the
    nearest one."""
    if nearest is None:
        detail = "nothing of this host is recorded"
    else:
        detail = f"differs from {nearest.method} {nearest.url} in: "
        detail += ", ".join(differences(asked, nearest)) or "nothing that is kept"
    problem = Problem(
        NOT_RECORDED, "this call is not in the recording", 422, detail=detail[:_MOST_DETAIL]
    )
    failed = ScrapeFailed(problem, TaskFailure.OTHER)
    failed.sent = 0
    return failed


def differences(asked: Asked, other: Exchange) -> list[str]:
    """Name the parts in which a request differs from a recorded one, without their values."""
    found: list[str] = []
    try:
        here, there = urlsplit(asked.url), urlsplit(other.url)
    except ValueError:
        return ["URL"]
    if asked.method != other.method:
        found.append(f"method {asked.method}")
    if (here.scheme, here.netloc) != (there.scheme, there.netloc):
        found.append("origin")
    if here.path != there.path:
        found.append(f"path {here.path}")
    queries = [_pairs(here.query), _pairs(there.query)]
    found += [f"query {name}" for name in _differing(*queries)]
    if queries[0] == queries[1] and here.query != there.query:
        found.append("spelling of the query")
    if here.fragment != there.fragment:
        found.append("fragment")
    found += [f"param {name}" for name in _differing(asked.params, other.params)]
    if asked.body != other.posted:
        found.append("body")
    return found


def _pairs(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True))


def _differing(here: dict[str, str], there: dict[str, str]) -> list[str]:
    return sorted(name for name in {*here, *there} if here.get(name) != there.get(name))


def _host(url: str) -> str:
    authority = url.partition("://")[2]
    for mark in "/\\?#":
        authority = authority.partition(mark)[0]
    return authority.rpartition("@")[2] or "?"
