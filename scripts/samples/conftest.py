"""A server on a clock that the tests move, and a client of it that speaks plain HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conveyor.testing.local_server import ConveyorServer


class Jobs:
    """The requests that these tests send."""

    def __init__(self, server: ConveyorServer) -> None:
        self.http = httpx.Client(
            base_url=server.base_url, headers={"X-API-Key": server.api_key}, timeout=30
        )

    def submit(self, *urls: str, **fields: Any) -> str:
        """Submit a job; return its id."""
        answer = self.http.post("/jobs", json={"tasks": [{"url": url} for url in urls], **fields})
        assert answer.status_code in (201, 202), answer.text
        job_id: str = answer.json()["job_id"]
        return job_id

    def get(self, path: str) -> Any:
        """Return what a path shows."""
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def run(self, job_id: str) -> Any:
        """Return the latest run of a job."""
        return self.get(f"/jobs/{job_id}")["latest_run"]

    def runs(self, job_id: str) -> list[Any]:
        """Return the runs of a job, oldest first."""
        found = self.get(f"/jobs/{job_id}/runs?page_size=100")["runs"]
        return sorted(found, key=lambda run: int(run["run_sequence"]))

    def results(self, job_id: str) -> list[Any]:
        """Return the results of a job."""
        rows: list[Any] = self.get(f"/jobs/{job_id}/results")["results"]
        return rows


@pytest.fixture
def server(conveyor_server: ConveyorServer, record_property: Any) -> Iterator[ConveyorServer]:
    """The server of a test; its virtual days are noted in the report."""
    before = conveyor_server.clock.now
    yield conveyor_server
    days = (conveyor_server.clock.now - before).total_seconds() / 86_400
    record_property("virtual_days", f"{days:.3f}")


@pytest.fixture
def jobs(server: ConveyorServer) -> Iterator[Jobs]:
    """The client of that server."""
    client = Jobs(server)
    yield client
    client.http.close()
