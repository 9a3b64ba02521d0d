"""The roles of production as processes: ready, not ready, gone; and what a fleet refuses."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from conveyor.domain.api_keys import key_hash
from conveyor.testing.fleet import FleetSize, RoleFleet, RoleProcess
from tests.acceptance.support_fleet import services
from tests.acceptance.support_wire import eventually, target
from tests.patient import SECONDS, fetched

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]
KEY = "key-of-the-team"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """An API that one key may call and a worker that finds its runs quickly. Permits are kept in
    DynamoDB: a ledger in Redis that begins anew is closed for one lease."""
    directory = tmp_path_factory.mktemp("roles")
    keys = directory / "keys"
    keys.write_text(f"{key_hash(KEY)} the team\n")
    with RoleFleet(
        replace(services(), redis=""),
        gateway="fake",
        directory=directory,
        inherited=os.environ,
        size=FleetSize(apis=1, workers=1),
        api_keys=str(keys),
        discovery_interval=0.3,
        shutdown_grace=30,
    ) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: RoleFleet) -> RoleFleet:
    """The fleet, all of it running again."""
    for process in running.processes:
        if not process.alive:
            running.restart(process)
    return running


def client(fleet: RoleFleet, key: str = KEY) -> httpx.Client:
    return httpx.Client(
        base_url=fleet.api, headers={"X-API-Key": key}, timeout=SECONDS, trust_env=False
    )


def readiness(process: RoleProcess) -> int | None:
    """Return the answer of /readyz; None if nobody answers any more."""
    try:
        return fetched(f"{process.info.metrics}/readyz").status_code
    except httpx.TransportError:
        return None


def submit(api: httpx.Client, *urls: str) -> str:
    tasks = [{"url": url} for url in urls]
    answer = api.post("/jobs", json={"tasks": tasks})
    assert answer.status_code == 201, answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


def stats(api: httpx.Client, job_id: str) -> dict[str, int]:
    found: dict[str, int] = api.get(f"/jobs/{job_id}").json()["latest_run"]["stats"]
    return found


def deliveries(worker: RoleProcess) -> float:
    """Count the messages that a worker has received."""
    text = fetched(f"{worker.info.metrics}/metrics").text
    found = re.search(r"^conveyor_deliveries_total (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def start_a_call(worker: RoleProcess, api: httpx.Client, *, delay: float) -> str:
    """Submit one slow page and wait until the worker has it; the job."""
    before = deliveries(worker)
    job_id = submit(api, target("slow", delay=delay))
    eventually(lambda: deliveries(worker) > before or None, "the task is received")
    return job_id


def ended(process: RoleProcess) -> int:
    """Wait for its end, without another signal; the exit code."""
    eventually(lambda: None if process.alive else True, "it ends")
    return process.end()


def test_a_worker_that_is_told_to_end_finishes_what_it_works(fleet: RoleFleet) -> None:
    [worker] = fleet.workers
    with client(fleet) as api:
        assert readiness(worker) == 200
        job_id = start_a_call(worker, api, delay=8)
        worker.signal(signal.SIGTERM)
        eventually(lambda: readiness(worker) == 503 or None, "it says that it is not ready")
        assert worker.alive

        assert ended(worker) == 0
        assert stats(api, job_id)["successful"] == 1
    assert readiness(worker) is None


def test_a_worker_that_stands_still_answers_no_probe_and_lives_again(fleet: RoleFleet) -> None:
    [worker] = fleet.workers
    probe = f"{worker.info.metrics}/livez"
    assert fetched(probe).status_code == 200
    worker.signal(signal.SIGSTOP)
    try:
        with pytest.raises(httpx.TimeoutException):
            httpx.get(probe, timeout=0.5, trust_env=False)
    finally:
        worker.signal(signal.SIGCONT)

    eventually(lambda: fetched(probe).status_code == 200 or None, "it lives again")


def test_a_second_signal_ends_a_worker_at_once(fleet: RoleFleet) -> None:
    [worker] = fleet.workers
    with client(fleet) as api:
        job_id = start_a_call(worker, api, delay=60)
        worker.signal(signal.SIGTERM)
        eventually(lambda: readiness(worker) == 503 or None, "it drains")

        assert worker.end() == 130
        assert stats(api, job_id)["completed"] == 0
        assert api.post(f"/jobs/{job_id}/stop").status_code == 200


def test_an_api_that_is_told_to_end_still_answers_until_it_is_noticed(fleet: RoleFleet) -> None:
    [process] = fleet.apis
    with client(fleet) as api:
        process.signal(signal.SIGTERM)
        eventually(lambda: readiness(process) == 503 or None, "it says that it is not ready")
        answered = api.get("/jobs")

        assert answered.status_code == 200
    assert ended(process) == 0


def test_only_known_keys_are_served_and_metrics_stand_apart(fleet: RoleFleet) -> None:
    with client(fleet, "another-key") as stranger, client(fleet) as api:
        assert stranger.get("/jobs").status_code == 401
        assert api.get("/jobs").status_code == 200
    origin = fleet.api.removesuffix("/v1")
    assert fetched(f"{origin}/metrics").status_code == 404
    for process in fleet.processes:
        text = fetched(f"{process.info.metrics}/metrics").text
        assert 'conveyor_aws_calls_total{operation="' in text


def test_no_process_says_a_secret(fleet: RoleFleet) -> None:
    with client(fleet) as api:
        job_id = submit(api, target("page"))
        eventually(
            lambda: stats(api, job_id)["completed"] == 1 or None, "the task ends", timeout=30.0
        )
    said = fleet.output()

    assert b'"message":"ready"' in said
    for secret in (KEY, fleet.environment["CONVEYOR_SECRET"]):
        assert secret.encode() not in said


@pytest.mark.parametrize(
    ("role", "changed", "told"),
    [
        (
            "worker",
            {"CONVEYOR_LEDGER": "redis", "CONVEYOR_REDIS_URL": "redis://127.0.0.1:1"},
            "this fleet keeps its permits in dynamodb",
        ),
        ("worker", {"CONVEYOR_BUCKET": "others"}, "this fleet keeps its bodies in the bucket"),
        ("api", {"CONVEYOR_BUCKET": "others"}, "this fleet keeps its bodies in the bucket"),
        ("api", {"CONVEYOR_SECRET": "another " * 8}, "this fleet uses another CONVEYOR_SECRET"),
        ("api", {"CONVEYOR_S3_ENDPOINT": "http://127.0.0.1:1"}, "s3 does not answer"),
        ("api", {"CONVEYOR_SQS_ENDPOINT": "http://127.0.0.1:1"}, "sqs does not answer"),
        ("worker", {"CONVEYOR_TABLE": "none"}, "there is no table none"),
        (
            "api",
            {"CONVEYOR_ENVIRONMENT": "none", "CONVEYOR_TABLE": "conveyor-{fleet}"},
            "bucket conveyor-{fleet} belongs to environment {fleet} (if it is a copy, conveyor"
            " admin rebind makes it this environment's); there is no queue conveyor-none-control"
            " (conveyor admin",
        ),
    ],
)
def test_who_is_none_of_the_fleet_does_not_start(
    fleet: RoleFleet, tmp_path: Path, role: str, changed: dict[str, str], told: str
) -> None:
    changed = {name: value.replace("{fleet}", fleet.name) for name, value in changed.items()}
    told = told.replace("{fleet}", fleet.name)
    changed["CONVEYOR_AWS_ATTEMPTS"] = "2"
    stranger = RoleProcess(role, tmp_path / "stranger.log", {**fleet.environment, **changed})
    stranger.start()
    with pytest.raises(RuntimeError):
        stranger.ready()

    assert ended(stranger) == 1
    said = stranger.log.read_text().splitlines()
    assert any(line.startswith(f"conveyor: {told}") for line in said), said


def test_an_api_whose_rates_redis_cannot_limit_starts_and_says_so(
    fleet: RoleFleet, tmp_path: Path
) -> None:
    changed = {
        "CONVEYOR_RATE_LIMIT": "5",
        "CONVEYOR_REDIS_URL": "redis://:a-word-to-hide@127.0.0.1:1/0",
    }
    api = RoleProcess("api", tmp_path / "api.log", {**fleet.environment, **changed})
    api.start()
    try:
        api.ready()
        assert api.end() == 0
    finally:
        api.kill()

    said = api.log.read_text()
    [line] = [line for line in said.splitlines() if "conveyor.permits" in line]
    assert "(127.0.0.1:1): requests are not rate-limited until it does" in line
    assert "a-word-to-hide" not in said


def test_a_fleet_that_is_removed_beneath_its_processes_says_so(tmp_path: Path) -> None:
    with RoleFleet(
        replace(services(), redis=""),
        gateway="fake",
        directory=tmp_path,
        inherited=os.environ,
        size=FleetSize(apis=1, workers=1),
        discovery_interval=0.3,
        shutdown_grace=0,
    ) as fleet:
        [api], [worker] = fleet.apis, fleet.workers
        fleet.admin("destroy", "--yes", fleet.name, "--even-if-alive")
        with client(fleet) as caller:
            answered = caller.get("/jobs")
        missing = f"there is no table conveyor-{fleet.name}"
        for process in (api, worker):
            eventually(lambda: readiness(process) == 503 or None, "it is not ready")  # noqa: B023
            eventually(lambda: missing in process.log.read_text() or None, "it says why")  # noqa: B023
        said = worker.log.read_text()

    assert (answered.status_code, answered.json()["code"]) == (503, "unavailable")
    assert fleet.name not in answered.text
    assert "Traceback" not in said
