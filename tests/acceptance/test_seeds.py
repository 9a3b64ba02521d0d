"""`conveyor-dev --seed`: the same seed gives the same ids, instants and bodies, in every state."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio import to_thread

from conveyor.clock import SystemClock
from conveyor.demo.seeds import DEMO, plant, plant_apart, read_seed
from conveyor.dev.binding import open_binding
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import TaskFailure
from conveyor.roles.dev import SYSTEM, ClockChoice
from conveyor.settings import load
from conveyor.testing.process import ServerProcess
from tests.acceptance.support_wire import eventually
from tests.disk import files_below
from tests.patient import SECONDS

FILE = """
start = "2027-03-01T08:00:00Z"
advance = "2d"

[[jobs]]
name = "shop"
webhook = { url = "https://hooks.example/shop" }
[[jobs.tasks]]
url = "https://shop.example/{n}"
count = 12
answer = { size = 300, delay = 0.5 }
[[jobs.tasks]]
url = "https://shop.example/gone"
answer = { status = 404, code = "REQS001", detail = "no such page" }

[[jobs]]
name = "mornings"
type = "scheduled"
[jobs.schedule]
calendar = { times_of_day = ["09:00"], cadence = { daily = {} } }
timezone = "Europe/Berlin"
[[jobs.tasks]]
url = "https://news.example/"

[[jobs]]
name = "held"
state = "paused"
max_inflight = 1
[[jobs.tasks]]
url = "https://slow.example/{n}"
count = 5
answer = { delay = 40 }

[[jobs]]
name = "busy"
state = "running"
[[jobs.tasks]]
url = "https://busy.example/{n}?delay=100"
count = 3
"""
SECRET, ORIGIN = "5e" * 32, "http://127.0.0.1:9000"


def _answers(api: httpx.Client, limit: int = 50) -> dict[str, str]:
    """The answers of a server to all that can be asked, as digests."""
    found: dict[str, str] = {}

    def get(path: str) -> Any:
        answer = api.get(path)
        assert answer.status_code == 200, answer.text
        found[path] = hashlib.sha256(answer.content).hexdigest()
        return answer

    for job in get("/jobs").json()["jobs"]:
        job_id = job["job_id"]
        for path in ("runs", "schedule/fires" if job["type"] == "scheduled" else "", ""):
            get(f"/jobs/{job_id}/{path}".rstrip("/"))
        if job["latest_run"] is None:
            continue
        page = get(f"/jobs/{job_id}/results?limit={limit}").json()
        for row in page["results"]:
            get(f"/jobs/{job_id}/tasks/{row['task_id']}/history")
            if row.get("result_url"):
                get(row["result_url"].partition("/v1")[2])
        if job.get("webhook"):
            assert get(f"/jobs/{job_id}/webhook/deliveries").json()["deliveries"]
    return found


def _planted(directory: Path, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Seed a server whose clock stands; its answers, and its jobs by their names."""
    settings = load({}, data_dir=str(directory), gateway="fake", secret=SECRET, public_url=ORIGIN)
    plant(read_seed(name), settings, "local", clock=ClockChoice("manual"))
    return _served(directory)


def _served(directory: Path) -> tuple[dict[str, str], dict[str, Any]]:
    environment = {**os.environ, "CONVEYOR_SECRET": SECRET, "CONVEYOR_PUBLIC_URL": ORIGIN}
    flags = ("--gateway", "fake", "--clock", "manual")
    with ServerProcess(directory, *flags, environment=environment) as server:
        headers = {"X-API-Key": "local"}
        with httpx.Client(base_url=server.info.api, headers=headers, timeout=SECONDS) as api:
            jobs = {job["name"]: job for job in api.get("/jobs").json()["jobs"]}
            return _answers(api), jobs


@pytest.mark.slow
def test_the_same_file_gives_the_same_answers(tmp_path: Path) -> None:
    file = tmp_path / "seed.toml"
    file.write_text(FILE)
    first, jobs = _planted(tmp_path / "one", str(file))
    second, _ = _planted(tmp_path / "two", str(file))
    assert first == second
    assert len(first) > 30
    states = {name: job["latest_run"]["status"] for name, job in jobs.items()}
    assert states == {
        "shop": "completed",
        "mornings": "completed",
        "held": "running",
        "busy": "running",
    }
    assert [
        jobs[name]["latest_run"].get("pause_state") == "paused" for name in ("held", "busy")
    ] == [
        True,
        False,
    ]
    assert jobs["held"]["latest_run"]["stats"]["successful"] == 1
    assert jobs["shop"]["latest_run"]["stats"]["failed"] == 1
    assert jobs["shop"]["created_at"].startswith("2027-03-01T08:00:00")


async def _filled(directory: Path, source: Path) -> None:
    """Fill the directory of a server that runs; the second time it refuses."""
    binding = await open_binding(directory, SystemClock(), secret=SECRET)
    try:
        await binding.fill(source)
        with pytest.raises(ConveyorError, match="there are jobs already"):
            await binding.fill(source)
    finally:
        await binding.ports.aclose()


@pytest.mark.slow
@pytest.mark.extended
def test_an_empty_server_takes_over_what_was_seeded_elsewhere(tmp_path: Path) -> None:
    file, seeded, other = tmp_path / "seed.toml", tmp_path / "seeded", tmp_path / "other"
    file.write_text(FILE)
    settings = load({}, data_dir=str(seeded), gateway="fake", secret=SECRET, public_url=ORIGIN)
    plant(read_seed(str(file)), settings, "local", clock=ClockChoice("manual"))
    anyio.run(_filled, other, seeded)
    shutil.copy(seeded / "clock", other)
    assert _served(other)[0] == _served(seeded)[0]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_play_that_is_ended_leaves_nothing_beyond_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, folder = tmp_path / "tmp", tmp_path / "folder"
    temporary.mkdir()
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    settings = load({}, data_dir=str(folder / "data"), gateway="fake", secret=SECRET)
    async with anyio.create_task_group() as group:
        group.start_soon(plant_apart, settings, "local")
        await to_thread.run_sync(
            eventually, lambda: next(files_below(tmp_path, "conveyor.db"), None), "it plays"
        )
        group.cancel_scope.cancel()
    assert list(files_below(temporary)) == []


@pytest.mark.slow
@pytest.mark.extended
def test_the_demo_has_runs_of_every_state_and_is_the_same_twice(tmp_path: Path) -> None:
    first, jobs = _planted(tmp_path / "one", DEMO)
    second, _ = _planted(tmp_path / "two", DEMO)
    assert first == second
    runs = {name: job["latest_run"] for name, job in jobs.items()}
    assert runs["large"]["stats"]["successful"] == 100_000
    assert runs["failures of each reason"]["stats"]["failure_reasons"].keys() == set(TaskFailure)
    assert (runs["running"]["status"], runs["running"].get("pause_state") == "paused") == (
        "running",
        False,
    )
    assert (runs["paused"]["status"], runs["paused"].get("pause_state") == "paused") == (
        "running",
        True,
    )
    assert runs["finished"]["status"] == runs["each morning"]["status"] == "completed"


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConveyorError, match="it has no"):
        read_seed(str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("jobs = 5", "it has no"),
        ("x = 1\nnonsense", "Expected '='"),
        (f"advance = {'1' * 5_000}", "4300 digits"),
        (f"jobs = {'[' * 3_000}{']' * 3_000}", "recursion"),
        ("[[jobs]]\ntasks = 5", "job 1"),
        ("[[jobs]]\ntasks = [5]", "job 1: each of its tasks is a table with a url"),
        ("speed = 3\n[[jobs]]", "speed is none of"),
        ("start = 5\n[[jobs]]", "start"),
        ('advance = "soon"\n[[jobs]]', "advance takes seconds"),
        ('[[jobs]]\nstate = "lost"', "state is one of finished, running, paused"),
        ('[[jobs]]\n[[jobs.tasks]]\nurl = "http://x.test"\ncount = 0', "count is a whole number"),
        ('[[jobs]]\n[[jobs.tasks]]\nurl = "http://x.test"\nanswer = {stat = 1}', "stat is none"),
        (
            '[[jobs]]\n[[jobs.tasks]]\nurl = "http://x.test"\nanswer = {status = "big"}',
            "the fake gateway takes no status",
        ),
    ],
)
def test_a_file_that_is_wrong_is_told_in_a_line(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "seed.toml"
    file.write_text(content)
    with pytest.raises(ConveyorError) as caught:
        read_seed(str(file))
    assert str(file) in caught.value.detail
    assert problem in caught.value.detail
    assert "\n" not in caught.value.detail


@pytest.mark.slow
def test_a_job_that_the_api_refuses_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "seed.toml"
    file.write_text('[[jobs]]\nname = "x"\npriority = 70\n[[jobs.tasks]]\nurl = "http://x.test/"\n')
    settings = load({}, data_dir=str(tmp_path / "data"), gateway="fake")
    with pytest.raises(ConveyorError, match="job 1: priority"):
        plant(read_seed(str(file)), settings, "local", clock=SYSTEM)
    assert [path.name for path in tmp_path.iterdir()] == ["seed.toml"]


def test_a_directory_with_data_and_another_gateway_are_refused(tmp_path: Path) -> None:
    (tmp_path / "conveyor.db").write_bytes(b"")
    seed = read_seed(DEMO)
    for gateway, problem in (("fake", "is not empty"), ("direct", "--gateway fake")):
        settings = load({}, data_dir=str(tmp_path), gateway=gateway)
        with pytest.raises(ConveyorError, match=problem):
            plant(seed, settings, "local", clock=SYSTEM)
    assert [path.name for path in tmp_path.iterdir()] == ["conveyor.db"]


@pytest.mark.slow
def test_the_command_says_what_is_wrong_in_a_line(tmp_path: Path) -> None:
    program = "from conveyor.cli import dev_main; dev_main()"
    words = [
        "--seed",
        str(tmp_path / "none.toml"),
        "--gateway",
        "fake",
        "--data-dir",
        str(tmp_path),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, timeout=SECONDS, check=False
    )
    assert ran.returncode == 1
    assert ran.stderr.decode() == "conveyor-dev: No such file or directory\n"


@pytest.mark.slow
def test_the_command_serves_what_was_seeded(tmp_path: Path) -> None:
    file = tmp_path / "seed.toml"
    file.write_text(FILE)
    directory = tmp_path / "data"
    with ServerProcess(directory, "--seed", str(file), "--gateway", "fake") as server:
        answer = httpx.get(
            f"{server.info.api}/jobs", headers={"X-API-Key": "local"}, timeout=SECONDS
        )
        assert {job["name"] for job in answer.json()["jobs"]} == {
            *("shop", "mornings", "held", "busy")
        }
    assert not (directory / "clock").exists()
