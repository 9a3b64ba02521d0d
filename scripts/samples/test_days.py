"""Hours and days of a client's life, in seconds of real time: retries, expiry, schedules, leases
and webhooks. The server is the real one; only its clock is moved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conveyor.testing.local_server import ConveyorServer, conveyor_server

if TYPE_CHECKING:
    from conftest import Jobs

pytestmark = pytest.mark.conveyor(clock="manual", clock_start="2027-03-01T00:00:00Z")
SPRING = pytest.mark.conveyor(clock="manual", clock_start="2027-03-26T12:00:00Z")
AUTUMN = pytest.mark.conveyor(clock="manual", clock_start="2027-10-29T12:00:00Z")


# Retries.


def test_a_page_that_fails_twice_is_had_at_the_third_attempt(
    server: ConveyorServer, jobs: Jobs
) -> None:
    page = server.url("flaky", flaky=2)
    job = jobs.submit(page)
    server.clock.run_until_idle()
    assert jobs.run(job)["status"] == "completed"
    assert server.hits.counts == {page: 3}


def test_no_attempt_is_made_before_its_backoff_has_passed(
    server: ConveyorServer, jobs: Jobs
) -> None:
    page = server.url("flaky", flaky=1)
    jobs.submit(page)
    server.clock.advance()
    assert server.hits.counts == {page: 1}
    server.clock.advance(minutes=10)
    assert server.hits.counts == {page: 2}


def test_a_page_is_left_alone_for_as_long_as_it_asks(server: ConveyorServer, jobs: Jobs) -> None:
    page = server.url("closed", flaky=0, status=503, retry_after="3000")
    jobs.submit(page)
    server.clock.advance(minutes=49)
    assert server.hits.counts == {page: 1}
    server.clock.advance(minutes=5)
    assert server.hits.counts == {page: 2}


def test_a_page_that_never_comes_is_given_up(server: ConveyorServer, jobs: Jobs) -> None:
    page = server.url("gone", status=503)
    job = jobs.submit(page, max_attempts=5)
    server.clock.advance(days=1)
    assert jobs.run(job)["stats"]["failed"] == 1
    assert server.hits.counts == {page: 5}


def test_nothing_more_is_asked_in_a_day_after_the_end(server: ConveyorServer, jobs: Jobs) -> None:
    job = jobs.submit(*(server.url(f"page/{number}") for number in range(20)))
    server.clock.advance(days=1)
    assert jobs.run(job)["stats"]["successful"] == 20
    assert server.hits.total == 20


def test_a_call_that_hangs_ends_with_its_timeout(server: ConveyorServer, jobs: Jobs) -> None:
    job = jobs.submit(server.url("hangs", hang=True), max_attempts=2)
    server.clock.run_until_idle()
    assert jobs.run(job)["stats"]["failed"] == 1
    assert server.hits.total == 2


# Expiry.


def test_a_link_expires_and_the_next_page_of_results_has_a_new_one(
    server: ConveyorServer, jobs: Jobs
) -> None:
    job = jobs.submit(server.url("page"))
    server.clock.run_until_idle()
    [row] = jobs.results(job)
    assert jobs.http.get(row["result_url"]).status_code == 200
    server.clock.advance(hours=2, minutes=1)
    assert jobs.http.get(row["result_url"]).status_code == 403
    [row] = jobs.results(job)
    assert jobs.http.get(row["result_url"]).status_code == 200


def test_a_result_expires_after_its_days_and_its_file_goes(
    server: ConveyorServer, jobs: Jobs
) -> None:
    job = jobs.submit(server.url("page"), result_ttl_days=7)
    server.clock.advance(days=6, hours=23)
    assert jobs.results(job)[0]["status"] == "successful"
    assert _bodies(server) == 1
    server.clock.advance(hours=4)
    assert jobs.results(job)[0]["status"] == "expired"
    assert _bodies(server) == 0


def test_a_result_is_kept_for_fourteen_days_unless_told(server: ConveyorServer, jobs: Jobs) -> None:
    job = jobs.submit(server.url("page"))
    server.clock.advance(days=13, hours=23)
    assert jobs.results(job)[0]["status"] == "successful"
    server.clock.advance(hours=2)
    assert jobs.results(job)[0]["status"] == "expired"


def test_an_idempotency_key_is_free_again_after_a_day(server: ConveyorServer, jobs: Jobs) -> None:
    def post() -> str:
        tasks = [{"url": server.url("page")}]
        answer = jobs.http.post("/jobs", json={"tasks": tasks}, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 201, answer.text
        job_id: str = answer.json()["job_id"]
        return job_id

    first = post()
    server.clock.advance(hours=23)
    assert post() == first
    server.clock.advance(hours=2)
    assert post() != first


def test_an_export_goes_after_its_hours(server: ConveyorServer, jobs: Jobs) -> None:
    job = jobs.submit(server.url("page"))
    server.clock.run_until_idle()
    run = jobs.run(job)["run_id"]
    made = jobs.http.post(f"/jobs/{job}/runs/{run}/exports?format=jsonl")
    assert made.status_code == 202, made.text
    path = f"/jobs/{job}/runs/{run}/exports/{made.json()['export_id']}"
    server.clock.advance(hours=11)
    assert jobs.get(path)["status"] == "completed"
    server.clock.advance(hours=3)
    assert jobs.http.get(path).status_code == 404


# Schedules, over both changes of the clock in Berlin.


@SPRING
def test_a_fire_in_the_hour_that_a_night_lacks_comes_once(
    server: ConveyorServer, jobs: Jobs
) -> None:
    job = _scheduled(
        server, jobs, {"calendar": {"times_of_day": ["02:00"], "cadence": {"daily": {}}}}
    )
    server.clock.advance(days=4)
    begun = [run["created_at"][:16] for run in jobs.runs(job)]
    assert begun == [
        "2027-03-27T01:00",
        "2027-03-28T01:00",
        "2027-03-29T00:00",
        "2027-03-30T00:00",
    ]


@AUTUMN
def test_a_fire_in_the_hour_that_a_night_has_twice_comes_once(
    server: ConveyorServer, jobs: Jobs
) -> None:
    job = _scheduled(
        server, jobs, {"calendar": {"times_of_day": ["02:00"], "cadence": {"daily": {}}}}
    )
    server.clock.advance(days=4)
    begun = [run["created_at"][:16] for run in jobs.runs(job)]
    assert begun == [
        "2027-10-30T00:00",
        "2027-10-31T00:00",
        "2027-11-01T01:00",
        "2027-11-02T01:00",
    ]


def test_a_rate_fires_for_ten_days(server: ConveyorServer, jobs: Jobs) -> None:
    job = _scheduled(server, jobs, {"rate": {"every": 12, "unit": "hour"}})
    server.clock.advance(days=10, minutes=1)
    assert [run["status"] for run in jobs.runs(job)] == ["completed"] * 20


# Leases, restarts, and a wall clock that is set.


def test_a_lease_lapses_with_its_server_and_the_next_one_goes_on(tmp_path: Path) -> None:
    words = {"clock": "manual", "clock_start": "2027-03-01T00:00:00Z"}
    from conftest import Jobs as Client

    with conveyor_server(tmp_path, **words) as first:
        page = first.url("slow", delay=20)
        jobs = Client(first)
        job = jobs.submit(page)
        first.clock.advance(seconds=5)
        stopped_at = first.clock.now
        assert first.hits.counts == {page: 1}
        jobs.http.close()
    with conveyor_server(tmp_path, **words) as second:
        jobs = Client(second)
        assert second.clock.now >= stopped_at
        second.clock.run_until_idle()
        assert jobs.run(job)["status"] == "completed"
        assert second.hits.counts == {page: 1}
        jobs.http.close()


def test_a_claim_outlives_many_of_its_leases_while_its_call_is_under_way(
    server: ConveyorServer, jobs: Jobs
) -> None:
    page = server.url("slow", delay=110)
    job = jobs.submit(page)
    server.clock.run_until_idle()
    assert jobs.run(job)["status"] == "completed"
    assert server.hits.counts == {page: 1}


def test_setting_the_wall_clock_back_keeps_a_run_going(server: ConveyorServer, jobs: Jobs) -> None:
    page = server.url("flaky", flaky=2)
    job = jobs.submit(page)
    server.clock.advance()
    server.clock.shift(minutes=-10)
    server.clock.run_until_idle()
    assert jobs.run(job)["status"] == "completed"


# Webhooks.


def test_an_event_comes_to_the_inbox_signed(server: ConveyorServer, jobs: Jobs) -> None:
    assert jobs.http.post("/hmac/keys/rotate").status_code == 201
    server.clock.advance(days=3)
    jobs.submit(server.url("page"), webhook={"url": f"{server.inbox}/hook", "signature": True})
    server.clock.run_until_idle()
    [event] = jobs.http.get(f"{server.inbox}/hook").json()["requests"]
    assert event["verified"]["x_signature"] is True
    assert event["verified"]["webhook_signature"] is True


def test_a_receiver_that_refuses_is_asked_over_days_and_then_given_up(
    server: ConveyorServer, jobs: Jobs
) -> None:
    job = jobs.submit(server.url("page"), webhook={"url": "http://127.0.0.1:9/closed"})
    server.clock.advance(days=4)
    [delivery] = jobs.get(f"/jobs/{job}/webhook/deliveries")["deliveries"]
    assert delivery["status"] == "failed"
    assert delivery["attempt_count"] == 10


def test_a_receiver_that_comes_back_gets_its_event(server: ConveyorServer, jobs: Jobs) -> None:
    with _receiver([503, 503, 503, 204]) as (url, bodies):
        job = jobs.submit(server.url("page"), webhook={"url": url})
        server.clock.run_until_idle()
        [delivery] = jobs.get(f"/jobs/{job}/webhook/deliveries")["deliveries"]
        assert (delivery["status"], delivery["attempt_count"]) == ("delivered", 4)
        assert len(bodies) == 4
        assert len(set(bodies)) == 1


def _bodies(server: ConveyorServer) -> int:
    return sum(path.is_file() for path in (server.data_dir / "blobs" / "results").rglob("*"))


def _scheduled(server: ConveyorServer, jobs: Jobs, schedule: dict[str, object]) -> str:
    return jobs.submit(
        server.url("news"),
        type="scheduled",
        schedule={"timezone": "Europe/Berlin", **schedule},
    )


@contextmanager
def _receiver(statuses: list[int]) -> Iterator[tuple[str, list[bytes]]]:
    """Answer with these statuses, one a request; yield the URL and the bodies that came."""
    bodies: list[bytes] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(statuses[len(bodies) - 1])
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
