"""Speaking to a server as any client would, many at a time, and waiting for what is to come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import httpx

T = TypeVar("T")

KEY = "test-key"
ENDED = frozenset({"completed", "stopped", "failed"})
_POLL = 0.005


def target(page: str, **behaviour: float | str) -> str:
    """Return a URL that the fake gateway answers as the keywords say (see
    `conveyor.gateway.fake.Behaviour`)."""
    query = f"?{urlencode(behaviour)}" if behaviour else ""
    return f"http://fake.test/{page}{query}"


def eventually(condition: Callable[[], T | None], what: str, *, timeout: float = 60.0) -> T:
    """The first value of `condition` that is not None. Raises AssertionError after `timeout`."""
    deadline = time.monotonic() + timeout
    while (value := condition()) is None:
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(_POLL)
    return value


def together(count: int, act: Callable[[int], T]) -> list[T]:
    """`act(0)` to `act(count - 1)`, each on a thread of its own, begun at the same moment."""
    start = Barrier(count)

    def begin(number: int) -> T:
        start.wait()
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def holds_no_permit(metrics: str) -> bool:
    """Return whether these metrics show a worker with no permit in hand."""
    return re.search(r"^conveyor_permits 0\.0$", metrics, re.MULTILINE) is not None


class Wire:
    """One caller's requests to one server. Safe to use from many threads."""

    def __init__(self, base_url: str, *, connections: int = 50, caller: str = KEY) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(
            base_url=base_url,
            headers={"X-API-Key": caller},
            timeout=60.0,
            limits=limits,
            trust_env=False,
            verify=False,  # plain HTTP on loopback, and loading certificates takes long
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()

    def send(
        self, method: str, path: str, *, body: Any = None, key: str | None = None, **query: Any
    ) -> httpx.Response:
        """Any request; whatever comes back. `key` is its Idempotency-Key."""
        headers = {} if key is None else {"Idempotency-Key": key}
        wanted = {name: value for name, value in query.items() if value is not None}
        return self._client.request(method, path, json=body, headers=headers, params=wanted)

    def ask(self, method: str, path: str, **more: Any) -> Any:
        """A request that has to succeed; the JSON that it brings."""
        response = self.send(method, path, **more)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def nothing_in_hand(self) -> bool | None:
        """Return whether the worker has given every permit back: all its received messages are
        concluded."""
        metrics = self._client.get(self._client.base_url.copy_with(path="/metrics"))
        return holds_no_permit(metrics.text) or None

    def submit(self, urls: Sequence[str], *, key: str | None = None, **fields: Any) -> Any:
        """Create a job; the answer."""
        tasks = [{"url": url} for url in urls]
        return self.ask("POST", "/jobs", body={"tasks": tasks, **fields}, key=key)

    def latest_run(self, job_id: str) -> Any:
        """The run that the job shows."""
        return self.ask("GET", f"/jobs/{job_id}")["latest_run"]

    def ended(self, job_id: str, *, timeout: float = 60.0) -> Any:
        """The latest run, once it has ended."""

        def look() -> Any:
            run = self.latest_run(job_id)
            return run if run["status"] in ENDED else None

        return eventually(look, f"job {job_id} ends", timeout=timeout)

    def rows(self, job_id: str, *, run_id: str | None = None, **query: Any) -> list[Any]:
        """Every row of a run, the latest by default, page by page; `query` may hold limit,
        status."""
        return [row for page in self.pages(job_id, run_id=run_id, **query) for row in page]

    def pages(self, job_id: str, *, run_id: str | None = None, **query: Any) -> Iterator[list[Any]]:
        """The pages of results of a run."""
        query.setdefault("limit", 1000)
        middle = "" if run_id is None else f"/runs/{run_id}"
        cursor = None
        while True:
            page = self.ask("GET", f"/jobs/{job_id}{middle}/results", cursor=cursor, **query)
            yield page["results"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def history(self, job_id: str, task_id: str) -> list[Any]:
        """The events of a task of the latest run."""
        events: list[Any] = self.ask("GET", f"/jobs/{job_id}/tasks/{task_id}/history")["events"]
        return events
