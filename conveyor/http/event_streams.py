"""Streams of server-sent events that tell how runs get on, over Starlette's streaming answer.

The API serves them below /v1; the pages mount `event_stream` at an address of their own.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from conveyor.http.malformed import CONNECTION
from conveyor.http.openapi_operations import STREAM_TYPE
from conveyor.http.request import Handler, RequestContext
from conveyor.service.progress import RunSnapshot, StreamWord, Watcher
from conveyor.service.service import Service

RETRY = b"retry: 2000\n\n"
"""Tells a browser after how many milliseconds to come back."""
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "Connection": "close"}
"""A proxy is to pass each event on at once, and a connection serves nothing after its stream."""
WORDS = {
    StreamWord.BEAT: b":\n\n",
    StreamWord.BYE: b"event: bye\ndata: {}\n\n",
    StreamWord.RESET: b"event: reset\ndata: {}\n\n",
}
_NUMBER = re.compile(r"[0-9]{1,15}")


async def event_stream(
    request: Request,
    service: Service,
    caller_id: str | None,
    *,
    job_id: str | None = None,
    run_id: str | None = None,
    named: Collection[tuple[str, str]] = (),
    accepted: Callable[[], bool] = lambda: True,
) -> Response:
    """Answer with the events of one run, or of the runs that changed last and of those `named` by
    their job and run ids.

    A `caller_id` of None sees the runs of all callers. The stream ends once its reader is not
    `accepted` any more. The page of live numbers mounts this at /dashboard/events, with the
    viewer's caller. Raises ConveyorError: not_found; rate_limited;
    unavailable while the server stops.
    """
    last = last_event_id(request)
    if job_id is not None and run_id is not None:
        watcher = await service.progress.watch_run(caller_id, job_id, run_id, last=last)
    else:
        watcher = await service.progress.watch_all(caller_id, last=last, named=named)
    watcher.accepted = accepted
    if request.method == "HEAD":
        with watcher:
            return Response(headers=HEADERS, media_type=STREAM_TYPE)
    return EventStream(watcher)


def last_event_id(request: Request) -> int | None:
    """Return the id that a client saw last; None for one that is no number."""
    given = request.headers.get("Last-Event-ID", "")
    return int(given) if _NUMBER.fullmatch(given) else None


class EventStream(StreamingResponse):
    """The answer that tells what a watcher is told. It frees the watcher as soon as its client is
    gone."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(_events(watcher), headers=HEADERS, media_type=STREAM_TYPE)
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the end."""
        with self._watcher:
            connection = _connection_of(scope)
            if connection is not None:
                connection.keep_little()
                self._watcher.cut = connection.cut
            await super().__call__(scope, receive, send)


def _connection_of(scope: Scope) -> Any:
    """Return the connection below a request, where our own server serves it."""
    found = scope.get("extensions", {}).get(CONNECTION)
    return None if found is None else found()


async def _events(watcher: Watcher) -> AsyncIterator[bytes]:
    yield RETRY
    async for word in watcher.words():
        yield WORDS[word] if isinstance(word, StreamWord) else _run_events(word)


def _run_events(snapshot: RunSnapshot) -> bytes:
    """Write a snapshot as an event, and the end of its run behind it."""
    text = b""
    if snapshot.body:
        text = b"event: run\nid: %d\ndata: %b\n\n" % (snapshot.number, snapshot.body)
    if snapshot.ended:
        names = {"job_id": snapshot.job_id, "run_id": snapshot.run_id, "status": snapshot.status}
        text += b"event: end\nid: %d\ndata: %b\n\n" % (snapshot.number, msgspec.json.encode(names))
    return text


async def run_events(call: RequestContext) -> Response:
    """Stream the progress of a run."""
    return await event_stream(
        call.request,
        call.service,
        call.caller_id,
        job_id=call.job_id,
        run_id=call.named_run_id,
        accepted=call.accepted,
    )


async def all_events(call: RequestContext) -> Response:
    """Stream the progress of the caller's runs."""
    return await event_stream(call.request, call.service, call.caller_id, accepted=call.accepted)


STREAM_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/events": {"GET": all_events},
    "/v1/jobs/{job_id}/runs/{run_id}/events": {"GET": run_events},
}
