"""More hours and days: schedules over both changes of the clock, the ladder of webhooks, leases
that lapse, and what expires."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conveyor.testing.local_server import ConveyorServer, conveyor_server

if TYPE_CHECKING:
    from conftest import Jobs

pytestmark = pytest.mark.conveyor(clock="manual", clock_start="2027-03-01T00:00:00Z")
SPRING = pytest.mark.conveyor(clock="manual", clock_start="2027-03-27T12:00:00Z")
AUTUMN = pytest.mark.conveyor(clock="manual", clock_start="2027-10-30T12:00:00Z")
DAILY: dict[str, Any] = {"daily": {}}


# Schedules, over both changes of the clock.


@SPRING
def test_a_morning_in_berlin_moves_by_an_hour_in_spring(server: ConveyorServer, jobs: Jobs) -> None:
    job = _scheduled(server, jobs, _calendar("09:00"))
    server.clock.advance(days=3)
    assert _begun(jobs, job) == ["2027-03-28T07:00", "2027-03-29T07:00", "2027-03-30T07:00"]


@AUTUMN
def test_a_morning_in_berlin_moves_back_in_autumn(server: ConveyorServer, jobs: Jobs) -> None:
    job = _scheduled(server, jobs, _calendar("09:00"))
    server.clock.advance(days=3)
    assert _begun(jobs, job) == ["2027-10-31T08:00", "2027-11-01T08:00", "2027-11-02T08:00"]


@SPRING
def test_a_rate_of_hours_is_even_over_the_change(server: ConveyorServer, jobs: Jobs) -> None:
    job = _scheduled(server, jobs, {"rate": {"every": 6, "unit": "hour"}})
    server.clock.advance(days=1, minutes=1)
    hours = [int(begun[11:13]) for begun in _begun(jobs, job)]
    assert [(later - hour) % 24 for hour, later in zip(hours, hours[1:], strict=False)] == [6, 6, 6]


@SPRING
def test_utc_knows_no_change(server: ConveyorServer, jobs: Jobs) -> None:
    job = _scheduled(server, jobs, _calendar("02:00"), timezone="UTC")
    server.clock.advance(days=2)
    assert _begun(jobs, job) == ["2027-03-28T02:00", "2027-03-29T02:00"]


def test_a_paused_schedule_fires_no_more_and_catches_nothing_up(
    server: ConveyorServer, jobs: Jobs
) -> None:
    job = _scheduled(server, jobs, _calendar("09:00"))
    server.clock.advance(days=2)
    assert _set_schedule(jobs, job, "paused") == 200
    server.clock.advance(days=3)
    assert _set_schedule(jobs, job, "active") == 200
    server.clock.advance(days=1)
    assert [begun[8:10] for begun in _begun(jobs, job)] == ["01", "02", "06"]


# The ladder of webhooks.


def test_a_receiver_is_asked_again_ever_later(server: ConveyorServer, jobs: Jobs) -> None:
    with _receiver(503) as (url, _):
        job = jobs.submit(server.url("page"), webhook={"url": url})
        server.clock.advance(seconds=1)
        seen = [_attempts(jobs, job)]
        for hours in (1, 5, 18, 24, 48):
            server.clock.advance(hours=hours)
            seen.append(_attempts(jobs, job))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 10)


def test_a_receiver_that_takes_an_event_is_asked_once(server: ConveyorServer, jobs: Jobs) -> None:
    with _receiver(204) as (url, bodies):
        jobs.submit(server.url("page"), webhook={"url": url})
        server.clock.advance(days=4)
        assert len(bodies) == 1


def test_an_event_that_was_given_up_is_sent_again_on_demand(
    server: ConveyorServer, jobs: Jobs
) -> None:
    with _receiver(503) as (url, bodies):
        job = jobs.submit(server.url("page"), webhook={"url": url})
        server.clock.advance(days=4)
        [delivery] = _deliveries(jobs, job)
        assert delivery["status"] == "failed"
        before = len(bodies)
        path = f"/webhook/deliveries/{delivery['delivery_id']}/replay"
        assert jobs.http.post(path).status_code in (200, 201, 202)
        server.clock.advance(seconds=5)
        assert len(bodies) > before


def test_each_run_of_a_schedule_tells_of_its_end(server: ConveyorServer, jobs: Jobs) -> None:
    job = _scheduled(
        server, jobs, _calendar("09:00"), webhook={"url": "https://hooks.example.com/x"}
    )
    server.clock.advance(days=3)
    kept = jobs.http.get(f"{server.inbox}/hooks.example.com").json()["requests"]
    assert len(kept) == len(jobs.runs(job)) == 3


# Leases that lapse.


def test_a_task_of_a_server_that_ended_is_made_again(tmp_path: Path) -> None:
    words = {"clock": "manual", "clock_start": "2027-03-01T00:00:00Z"}
    from conftest import Jobs as Client

    with conveyor_server(tmp_path, **words) as first:
        pages = [first.url(f"slow/{number}", delay=30) for number in range(5)]
        jobs = Client(first)
        job = jobs.submit(*pages)
        first.clock.advance(seconds=10)
        jobs.http.close()
    for _ in range(2):
        with conveyor_server(tmp_path, **words) as later:
            jobs = Client(later)
            later.clock.advance(days=1)
            assert jobs.run(job)["stats"]["successful"] == 5
            jobs.http.close()


def test_a_claim_is_kept_over_an_hour_of_the_wall_clock_forward(
    server: ConveyorServer, jobs: Jobs
) -> None:
    page = server.url("slow", delay=60)
    job = jobs.submit(page)
    server.clock.advance(seconds=5)
    server.clock.shift(hours=1)
    server.clock.run_until_idle()
    assert jobs.run(job)["stats"]["successful"] == 1
    assert server.hits.counts == {page: 1}


def test_a_paused_job_waits_for_days_and_goes_on(server: ConveyorServer, jobs: Jobs) -> None:
    page = server.url("slow", delay=30)
    job = jobs.submit(page, server.url("other"), max_inflight=1)
    assert jobs.http.post(f"/jobs/{job}/pause").status_code == 200
    server.clock.advance(days=2)
    assert jobs.run(job)["status"] != "completed"
    assert jobs.http.post(f"/jobs/{job}/resume").status_code == 200
    server.clock.run_until_idle()
    assert jobs.run(job)["stats"]["successful"] == 2


# What expires.


def test_a_link_lives_for_as_long_as_it_says(server: ConveyorServer, jobs: Jobs) -> None:
    job = jobs.submit(server.url("page"))
    server.clock.run_until_idle()
    [row] = jobs.results(job)
    server.clock.advance(minutes=50)
    assert jobs.http.get(row["result_url"]).status_code == 200
    server.clock.advance(days=1)
    assert jobs.http.get(row["result_url"]).status_code == 403


def test_results_expire_run_by_run(server: ConveyorServer, jobs: Jobs) -> None:
    job = _scheduled(server, jobs, _calendar("09:00"), result_ttl_days=2)
    server.clock.advance(days=5)
    kept = [
        jobs.get(f"/jobs/{job}/runs/{run['run_id']}/results")["results"][0]["status"]
        for run in jobs.runs(job)
    ]
    assert kept == ["expired", "expired", "expired", "successful", "successful"]


@pytest.mark.parametrize("days", [1, 30])
def test_a_result_is_kept_for_its_own_days(server: ConveyorServer, jobs: Jobs, days: int) -> None:
    job = jobs.submit(server.url("page"), result_ttl_days=days)
    server.clock.advance(days=days, hours=-1)
    assert jobs.results(job)[0]["status"] == "successful"
    server.clock.advance(hours=3)
    assert jobs.results(job)[0]["status"] == "expired"


def test_a_failed_task_has_nothing_to_expire(server: ConveyorServer, jobs: Jobs) -> None:
    job = jobs.submit(server.url("gone", status=404), result_ttl_days=1)
    server.clock.advance(days=3)
    assert jobs.results(job)[0]["status"] == "failed"


def test_an_unused_upload_slot_expires(server: ConveyorServer, jobs: Jobs) -> None:
    made = jobs.http.post("/job_inputs", json={"type": "jsonl"})
    assert made.status_code == 201, made.text
    server.clock.advance(days=2)
    answer = jobs.http.put(made.json()["upload"]["url"], content=b"{}")
    assert answer.status_code >= 400


# Retries over a day.


@pytest.mark.parametrize("flaky", [3, 4])
def test_a_page_that_comes_back_late_is_had_within_the_day(
    server: ConveyorServer, jobs: Jobs, flaky: int
) -> None:
    page = server.url("flaky", flaky=flaky)
    job = jobs.submit(page, max_attempts=5)
    server.clock.advance(days=1)
    assert jobs.run(job)["stats"]["successful"] == 1
    assert server.hits.counts == {page: flaky + 1}


def _calendar(*times: str) -> dict[str, Any]:
    return {"calendar": {"times_of_day": list(times), "cadence": DAILY}}


def _scheduled(
    server: ConveyorServer,
    jobs: Jobs,
    schedule: dict[str, Any],
    *,
    timezone: str = "Europe/Berlin",
    **fields: Any,
) -> str:
    whole = {"timezone": timezone, **schedule}
    return jobs.submit(server.url("news"), type="scheduled", schedule=whole, **fields)


def _set_schedule(jobs: Jobs, job: str, state: str) -> int:
    return jobs.http.post(f"/jobs/{job}/schedule/state", json={"schedule_state": state}).status_code


def _begun(jobs: Jobs, job: str) -> list[str]:
    return [run["created_at"][:16] for run in jobs.runs(job)]


def _deliveries(jobs: Jobs, job: str) -> list[Any]:
    found: list[Any] = jobs.get(f"/jobs/{job}/webhook/deliveries")["deliveries"]
    return found


def _attempts(jobs: Jobs, job: str) -> int:
    [delivery] = _deliveries(jobs, job)
    return int(delivery["attempt_count"])


@contextmanager
def _receiver(status: int) -> Iterator[tuple[str, list[bytes]]]:
    """Answer each request so; yield the URL and the bodies that came."""
    bodies: list[bytes] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answers) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{receiver.server_port}/hook", bodies
        finally:
            receiver.shutdown()
            thread.join()
