"""The wire as a test speaks it: requests with a key, waiting for a run, all pages of its results,
and what every problem must look like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import httpx

from tests.acceptance.support_wire import ENDED, eventually

KEY = "key-of-the-acceptance-tests"
TIMEOUT = 60.0
LARGE = 10_000
"""Tasks of a submit that are written after the answer, by default."""

Json = dict[str, Any]


class Caller:
    """An HTTP client of one server under one key; `http` is the plain client inside."""

    def __init__(self, api: str, key: str | None = KEY) -> None:
        headers = {"Accept-Encoding": "identity"} | ({"X-API-Key": key} if key else {})
        self.http = httpx.Client(
            base_url=api,
            headers=headers,
            timeout=TIMEOUT,
            trust_env=False,
            verify=False,  # plain HTTP on loopback, and loading certificates takes long
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.http.close()

    def submit(self, *tasks: str | Json, **fields: object) -> Json:
        """Create a job of these URLs or tasks; the answer."""
        listed = [{"url": task} if isinstance(task, str) else task for task in tasks]
        response = self.http.post("/jobs", json={"tasks": listed, **fields})
        assert response.status_code == (202 if len(listed) >= LARGE else 201), response.text
        return as_json(response)

    def get(self, path: str, **query: object) -> Json:
        """The JSON of a GET that must succeed."""
        response = self.http.get(path, params={name: str(value) for name, value in query.items()})
        assert response.status_code == 200, response.text
        return as_json(response)

    def wait(self, job: Json, seconds: float = TIMEOUT) -> Json:
        """The latest run of a job, once it has ended."""

        def look() -> Json | None:
            run: Json = self.get(f"/jobs/{job['job_id']}")["latest_run"]
            return run if run["status"] in ENDED else None

        return eventually(look, f"job {job['job_id']} ends", timeout=seconds)

    def results(self, job: Json, **query: object) -> list[Json]:
        """Every row of the latest run, in order."""
        return list(self._rows(f"/jobs/{job['job_id']}/results", query))

    def scraped(self, *tasks: str | Json, **fields: object) -> list[Json]:
        """Submit, wait for the end, and list the rows: one a task."""
        job = self.submit(*tasks, **fields)
        run = self.wait(job)
        assert run["status"] == "completed", run
        rows = self.results(job, limit=1_000)
        assert len(rows) == len(tasks)
        return [row | {"job_id": job["job_id"]} for row in rows]

    def task_path(self, row: Json, what: str) -> str:
        """The path of a row of `scraped`: its content or history."""
        return f"/jobs/{row['job_id']}/runs/{row['run_id']}/tasks/{row['task_id']}/{what}"

    def content(self, row: Json) -> httpx.Response:
        """The body of a row of `scraped`."""
        return self.http.get(self.task_path(row, "content"))

    def history(self, row: Json) -> list[Json]:
        """The events of a row of `scraped`."""
        events: list[Json] = self.get(self.task_path(row, "history"))["events"]
        return events

    def _rows(self, path: str, query: dict[str, object]) -> Iterator[Json]:
        while True:
            page = self.get(path, **query)
            yield from page["results"]
            if "next_cursor" not in page:
                return
            query = query | {"cursor": page["next_cursor"]}


def as_json(response: httpx.Response) -> Json:
    """The JSON object of an answer."""
    assert response.headers["Content-Type"] in ("application/json", "application/problem+json")
    document: Json = response.json()
    assert isinstance(document, dict), document
    return document


def problem_of(response: httpx.Response, *, status: int, code: str) -> Json:
    """The problem document of a refusal, which is checked to be whole and to be this one."""
    problem = any_problem_of(response)
    assert (problem["status"], problem["code"]) == (status, code), problem
    return problem


def any_problem_of(response: httpx.Response) -> Json:
    """The problem document of a refusal, which is checked to be whole."""
    assert response.headers["Content-Type"] == "application/problem+json", response.text
    assert response.headers["X-Request-ID"]
    problem = as_json(response)
    texts = ("type", "title", "detail", "code", "instance")
    assert set(problem) - {"invalid_tasks"} == {*texts, "status"}, problem
    assert all(isinstance(problem[name], str) and problem[name] for name in texts), problem
    assert problem["status"] == response.status_code
    assert problem["type"] == f"urn:conveyor:problem:{problem['code']}"
    assert problem["instance"] == f"urn:conveyor:request:{response.headers['X-Request-ID']}"
    return problem
