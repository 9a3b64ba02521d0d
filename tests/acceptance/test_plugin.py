"""The pytest plugin, used as its readers use it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from zenrows import ZenRowsBatchClient

from conveyor.testing.local_server import ConveyorServer
from tests.acceptance.support_cli import QUIET_PYTEST
from tests.patient import SECONDS

README = Path(__file__).parents[2] / "README.md"
HEAVY = {"anyio", "asyncio", "httpx", "msgspec", "starlette", "uvicorn", "aiohttp", "sqlite3"}


def client_of(server: ConveyorServer) -> ZenRowsBatchClient:
    return ZenRowsBatchClient(api_key=server.api_key, base_url=server.base_url)


def test_the_example_in_the_readme_passes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "def test_" in block]
    (tmp_path / "test_example.py").write_text(example)
    done = subprocess.run(
        [*QUIET_PYTEST, "-p", "no:asyncio", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_plugin_loads_nothing_heavy() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import conveyor.testing.plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = done.stdout.split()
    assert "conveyor.testing.plugin" in loaded
    assert not HEAVY & {name.partition(".")[0] for name in loaded}


def test_it_is_silent_and_drains_and_counts(
    conveyor_server: ConveyorServer, capfd: pytest.CaptureFixture[str]
) -> None:
    urls = [conveyor_server.url(f"page{number}", delay=0.01) for number in range(30)]
    with client_of(conveyor_server) as client:
        job = client.submit_regular([*urls, conveyor_server.url("exact", body=b"\x00\xff")])
        conveyor_server.drain(timeout=60)
        run = job.run.load()
        assert (run.status.value, run.stats.successful) == ("completed", 31)
        bodies = [result.body for result in job.run.download_to_memory()]
    assert bodies[-1] == b"\x00\xff"
    assert conveyor_server.hits.total == 31
    assert [conveyor_server.hits.counts[url] for url in urls] == [1] * 30
    assert capfd.readouterr() == ("", "")


def test_an_open_job_is_drained_once_its_tasks_have_ended(conveyor_server: ConveyorServer) -> None:
    with client_of(conveyor_server) as client:
        job = client.submit_open()
        job.add_tasks({"tasks": [{"url": conveyor_server.url(name)} for name in ("a", "b")]})
        conveyor_server.drain(timeout=60)
        assert job.run.load().status.value == "pending"
        job.close()
        conveyor_server.drain(timeout=60)
        assert job.run.load().status.value == "completed"


def test_a_run_that_does_not_end_is_named(conveyor_server: ConveyorServer) -> None:
    with client_of(conveyor_server) as client:
        job = client.submit_regular([conveyor_server.url("slow", hang=True)])
        with pytest.raises(TimeoutError, match=f"job {job.job_id} is running with 0 of 1 done"):
            conveyor_server.drain(timeout=0.1)
        job.run.pause()
        with pytest.raises(TimeoutError, match="is paused"):
            conveyor_server.drain(timeout=0.1)


async def test_it_works_beside_an_event_loop(conveyor_server: ConveyorServer) -> None:
    headers = {"X-API-Key": conveyor_server.api_key}
    async with httpx.AsyncClient(
        headers=headers, base_url=conveyor_server.base_url, timeout=SECONDS
    ) as client:
        body = {"tasks": [{"url": conveyor_server.url("a")}]}
        assert (await client.post("/jobs", json=body)).status_code == 201
        conveyor_server.drain(timeout=60)
        (job,) = (await client.get("/jobs")).json()["jobs"]
    assert job["latest_run"]["status"] == "completed"


def test_each_test_has_a_server_of_its_own(conveyor_server: ConveyorServer) -> None:
    with client_of(conveyor_server) as client:
        assert client.list_jobs().jobs == []
    assert conveyor_server.hits.total == 0


def test_urls_tell_the_gateway_what_to_answer(conveyor_server: ConveyorServer) -> None:
    assert conveyor_server.url() == "http://fake.test/"
    assert conveyor_server.url("/a b") == "http://fake.test/a b"
    assert conveyor_server.url("x", status=404, hang=True) == "http://fake.test/x?status=404&hang=1"
    assert conveyor_server.url("x", body=b"\xff") == "http://fake.test/x?body64=_w%3D%3D"
    for wrong in ({"nonsense": 1}, {"statuss": 404}, {"type": b"text/html"}):
        with pytest.raises(TypeError, match=f"url\\(\\) takes no '{next(iter(wrong))}'"):
            conveyor_server.url("x", **wrong)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("status", "abc"),
        ("status", 99),
        ("status", 600),
        ("status", True),
        ("flaky", -1),
        ("flaky", 1.5),
        ("delay", "soon"),
        ("delay", -0.1),
        ("delay", float("nan")),
        ("size", -1),
        ("hang", "no"),
        ("echo", 2),
        ("reset", "a\nb"),
        ("reset", "later"),
        ("body64", "no base 64!"),
    ],
)
def test_a_value_that_the_gateway_would_pass_over_is_an_error_at_the_call(
    conveyor_server: ConveyorServer, word: str, value: str | float
) -> None:
    with pytest.raises(ValueError, match=f"url\\(\\) takes no {word}="):
        conveyor_server.url("x", **{word: value})
