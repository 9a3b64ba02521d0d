"""The routes below /_dev of a test's server, as its tests use them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from http.client import HTTPConnection
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.faults import FAULTS_PATH
from conveyor.http.middleware import INBOX_PATH
from conveyor.http.routes_dev import (
    CALLBACKS_PATH,
    CONFIRMATION,
    RESET_PATH,
    RUNS_PATH,
    CallbacksBody,
)
from conveyor.ports.outbox import SentCallback

ANSWER_WITHIN = 60.0
"""Seconds in which a server answers, on a machine that others use too."""
FIRED_WITHIN = 60
"""Seconds of the server's clock: a worker sees a moment later that something is due."""


class ClientJob(Protocol):
    """A job as a client holds it."""

    @property
    def job_id(self) -> str: ...


class DevRoutes:
    """Sends requests to one server, each over a connection of its own, and waits for the answer."""

    def __init__(self, origin: str, token: str) -> None:
        self.origin = origin
        self._address = urlsplit(origin).netloc
        self._credentials = {"Authorization": f"Bearer {token}"}

    def send(self, method: str, path: str, body: object = None, *, key: str | None = None) -> Any:
        """Return the JSON of an answer, None without one; with a `key`, of a request to the API.

        Raises ConveyorError with the code and detail of a refusal.
        """
        headers = dict(self._credentials if key is None else {"X-API-Key": key})
        content = None if body is None else msgspec.json.encode(body)
        if content is not None:
            headers["Content-Type"] = "application/json"
        with closing(HTTPConnection(self._address, timeout=ANSWER_WITHIN)) as connection:
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            shown = answer.read()
        if answer.status >= 400:
            raise _refusal(shown)
        return msgspec.json.decode(shown) if shown else None

    def runs(self) -> Any:
        """Return the runs of all callers: those that are `busy`, and the `latest`."""
        return self.send("GET", RUNS_PATH)

    def callbacks(self) -> list[SentCallback]:
        """Return the callbacks to state machines, oldest first."""
        return msgspec.convert(self.send("GET", CALLBACKS_PATH), CallbacksBody).callbacks

    def reset(self) -> None:
        """Remove all data of the server."""
        self.send("POST", RESET_PATH, CONFIRMATION)


def _refusal(shown: bytes) -> ConveyorError:
    problem = msgspec.json.decode(shown)
    return ConveyorError(ErrorCode(problem["code"]), problem["detail"])


class ApiFailures:
    """Makes requests to the API fail, so that a test sees what its client does then.

    `path` has `*` for any characters. Each call adds a fault; a request gets the first that fits
    it. All raise ConveyorError(invalid_argument) for a value that cannot be.
    """

    def __init__(self, routes: DevRoutes) -> None:
        self._routes = routes

    def fail(
        self,
        status: int = 503,
        *,
        times: int = 1,
        path: str = "/v1/*",
        method: str = "",
        retry_after: int | str = "",
    ) -> None:
        """Answer the next `times` requests with an error; they have no effect."""
        self._add("error", times, path, method, status=status, retry_after=str(retry_after))

    def hang(self, *, times: int = 1, path: str = "/v1/*", method: str = "") -> None:
        """Never answer the next `times` requests; they have no effect."""
        self._add("hang", times, path, method)

    def cut(self, *, times: int = 1, path: str = "/v1/*", method: str = "") -> None:
        """Serve the next `times` requests, and break off in the middle of the answer."""
        self._add("cut", times, path, method)

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """Return the faults that no request has got yet."""
        faults: list[dict[str, Any]] = self._routes.send("GET", FAULTS_PATH)["faults"]
        return faults

    def recover(self) -> None:
        """Drop all faults; a request that hangs is cut off."""
        self._routes.send("DELETE", FAULTS_PATH)

    def _add(self, kind: str, times: int, path: str, method: str, **fields: object) -> None:
        fault = {"kind": kind, "times": times, "path": path, "method": method, **fields}
        self._routes.send("POST", FAULTS_PATH, fault)


class ServerInbox:
    """The receiver of a server: events that are sent to a name of the test's own are kept there. As
    a text, it is the URL above the names."""

    def __init__(self, routes: DevRoutes) -> None:
        self._routes = routes

    def __str__(self) -> str:
        return f"{self._routes.origin}{INBOX_PATH}"

    def url(self, name: str) -> str:
        """Return the URL of a name, for `webhook`. Raises ValueError for a name with a slash."""
        return f"{self._routes.origin}{_inbox_path(name)}"

    def requests(self, name: str) -> list[dict[str, Any]]:
        """Return what came to a name, oldest first: `headers`, `text`, `verified`, `answered` …"""
        kept: list[dict[str, Any]] = self._routes.send("GET", _inbox_path(name))["requests"]
        return kept

    def events(self, name: str) -> list[Any]:
        """Return the bodies that came to a name, read as JSON."""
        return [msgspec.json.decode(one["text"]) for one in self.requests(name)]

    def next(
        self, name: str, *, status: int = 204, times: int = 1, delay: float | str = 0.0
    ) -> None:
        """Answer the next `times` requests to a name with a status, after a delay: seconds, or a
        text such as 20s, on the server's clock. Raises ConveyorError(invalid_argument)."""
        answer = {"status": status, "times": times, "delay": delay}
        self._routes.send("POST", f"{_inbox_path(name)}/next", answer)

    def clear(self, name: str) -> None:
        """Drop what came to a name, and what it was to answer."""
        self._routes.send("DELETE", _inbox_path(name))


def _inbox_path(name: str) -> str:
    if "/" in name:
        raise ValueError(f"a name of the inbox has no /, unlike {name!r}")
    return f"{INBOX_PATH}/{quote(name, safe='')}"


class MovableClock(Protocol):
    """The part of a server's clock that fires of schedules need."""

    def set(self, instant: datetime | str) -> None: ...

    def advance(self, *, seconds: float) -> None: ...


class ServerSchedules:
    """Fires the schedules of jobs, on a clock that is moved."""

    def __init__(self, routes: DevRoutes, key: str, clock: Callable[[], MovableClock]) -> None:
        self._routes = routes
        self._key = key
        self._clock = clock

    def fire(self, job: ClientJob | str, *, api_key: str = "") -> dict[str, Any]:
        """Move the clock until a job has fired the next time, and return what became of that.

        Raises TypeError on the system's clock; ValueError for a job whose schedule does not fire
        any more; ConveyorError: not_found; conflict on a regular job.
        """
        clock = self._clock()
        job_id = job if isinstance(job, str) else job.job_id
        key, path = api_key or self._key, f"/v1/jobs/{quote(job_id, safe='')}/schedule"
        due: list[dict[str, Any]] = self._routes.send("GET", path, key=key)["fires"]
        if not due:
            raise ValueError(f"job {job_id} has no next fire: its schedule is paused or over")
        clock.set(due[0]["at"])
        for _ in range(FIRED_WITHIN):
            fired = self._routes.send("GET", f"{path}/fires?limit=1", key=key)["fires"]
            if fired and fired[0]["last_at"] >= due[0]["at"]:
                return dict(fired[0])
            clock.advance(seconds=1)
        raise ValueError(f"job {job_id} has not fired within {FIRED_WITHIN} s of its time")
