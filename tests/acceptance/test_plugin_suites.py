"""Suites of an application that uses the plugin, run by pytest as its own developers run them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.acceptance.support_cli import QUIET_PYTEST

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.server]
DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"
KEY = "key-of-the-application-0815"
APPLICATION = f"""
import httpx

KEY = "{KEY}"


def submit(server, *urls, **fields):
    body = {{"tasks": [{{"url": url}} for url in urls], **fields}}
    headers = {{"X-API-Key": KEY}}
    answer = httpx.post(f"{{server.base_url}}/jobs", json=body, headers=headers, timeout=60)
    assert answer.status_code == 201, answer.text
    return answer.json()["job_id"]


async def asubmit(server, *urls):
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        body = {{"tasks": [{{"url": url}} for url in urls]}}
        answer = await client.post("/jobs", json=body, headers={{"X-API-Key": KEY}})
    assert answer.status_code == 201, answer.text
"""


def run(directory: Path, suite: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a suite beside the application, with warnings as errors."""
    (directory / "application.py").write_text(APPLICATION)
    (directory / "test_suite.py").write_text(dedent(suite))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*QUIET_PYTEST, ".", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**kept, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def assert_passed(done: subprocess.CompletedProcess[str], count: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} passed" in done.stdout
    assert "warning" not in done.stdout


WITHOUT_ASYNCIO = ("-p", "no:asyncio")
STRICT = ("-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function")

SHARED = """
import os, threading
import pytest
from application import submit


@pytest.mark.parametrize("number", range(12))
def test_it_is_empty_at_the_start(conveyor_shared, number):
    assert conveyor_shared.hits.total == 0
    assert conveyor_shared.calls == conveyor_shared.gateway.rules == []
    assert conveyor_shared.api.waiting == []
    submit(conveyor_shared, *(f"https://shop.example/p/{place}" for place in range(5)))
    conveyor_shared.when("https://shop.example/*").respond(status=404)
    conveyor_shared.inbox.next("hook", status=500)
    if number % 2:
        conveyor_shared.drain()
    conveyor_shared.api.fail(times=9)


def test_the_variables_lead_to_it(conveyor_shared, conveyor_environment):
    assert os.environ["CONVEYOR_URL"] == conveyor_shared.base_url


@pytest.fixture(scope="session", autouse=True)
def one_boot(tmp_path_factory):
    yield
    assert len(list(tmp_path_factory.getbasetemp().glob("conveyor[0-9]*"))) == 1
"""


@pytest.mark.parametrize("processes", [(), ("-n", "4")])
def test_one_server_is_shared_and_emptied(tmp_path: Path, processes: tuple[str, ...]) -> None:
    assert_passed(run(tmp_path, SHARED, *WITHOUT_ASYNCIO, *processes), 13)


def test_a_suite_passes_in_four_processes(tmp_path: Path) -> None:
    suite = """
    import pytest
    from application import submit


    @pytest.mark.parametrize("number", range(8))
    def test_one(conveyor_server, number):
        submit(conveyor_server, conveyor_server.url(f"page/{number}", flaky=1))
        conveyor_server.drain()
        assert conveyor_server.hits.total == 2
    """
    assert_passed(run(tmp_path, suite, *WITHOUT_ASYNCIO, "-n", "4"), 8)


ASYNC = """
import asyncio
import pytest
import conveyor.testing
from application import asubmit

pytestmark = pytest.mark.{mark}


async def test_a_fixture(conveyor_server):
    await asubmit(conveyor_server, conveyor_server.url("a", delay=0.05))
    await conveyor_server.adrain()
    assert conveyor_server.hits.total == 1


async def test_the_shared_one(conveyor_shared):
    conveyor_shared.when("https://shop.example/*").respond(status=503).then(body="ok")
    await asubmit(conveyor_shared, "https://shop.example/p/1")
    await conveyor_shared.adrain()
    assert len(conveyor_shared.calls) == 2


@pytest.mark.conveyor(clock="manual")
async def test_the_moved_clock(conveyor_server):
    await asubmit(conveyor_server, conveyor_server.url("a", status=503, retry_after="3000"))
    await conveyor_server.adrain()
    assert conveyor_server.hits.total > 1


async def test_a_context():
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    async with conveyor.testing.server() as server:
        await asubmit(server, server.url("a", delay=0.2))
        ticking = asyncio.ensure_future(tick())
        await server.adrain()
        ticking.cancel()
    assert ticks > 10
"""


@pytest.mark.parametrize(
    ("mark", "arguments"), [("asyncio", STRICT), ("anyio", (*WITHOUT_ASYNCIO, "-k", "not trio"))]
)
def test_async_suites_pass(tmp_path: Path, mark: str, arguments: tuple[str, ...]) -> None:
    assert_passed(run(tmp_path, ASYNC.format(mark=mark), *arguments), 4)


def test_the_report_of_a_failed_test_has_a_section_without_the_key(tmp_path: Path) -> None:
    suite = """
    import logging
    from application import KEY, submit


    def test_one(conveyor_server):
        conveyor_server.api_key = KEY
        headers = {"Authorization": "Bearer hush-hush-hush"}
        submit(conveyor_server, conveyor_server.url("gone", status=404), "http://fake.test/a")
        conveyor_server.drain()
        logging.getLogger("conveyor.test").warning("a line of the log about %s", KEY)
        assert len(conveyor_server.hits.counts) == 3
    """
    done = run(tmp_path, suite, *WITHOUT_ASYNCIO, "--show-capture=no", "--tb=line")
    assert done.returncode == 1
    report = run(tmp_path, suite, *WITHOUT_ASYNCIO, "--tb=short").stdout
    section = report.partition("conveyor at http://127.0.0.1:")[2].partition("=====")[0]
    assert "is completed with 2 of 2 done, 1 failed (1 bad_target)" in section
    assert "WARNING conveyor.test: a line of the log about …" in section
    assert KEY not in section


def test_the_report_has_the_server_that_only_a_fixture_uses(tmp_path: Path) -> None:
    suite = """
    import pytest


    @pytest.mark.parametrize("number", [1, 2])
    def test_one(conveyor_environment, number):
        assert number == 1


    def test_shared(conveyor_shared):
        raise AssertionError


    def test_shared_again(conveyor_shared):
        pass
    """
    done = run(tmp_path, suite, *WITHOUT_ASYNCIO)
    assert "2 failed, 2 passed" in done.stdout
    assert done.stdout.count("conveyor at http://127.0.0.1:") == 2


def test_a_wrong_marker_is_an_error_of_use(tmp_path: Path) -> None:
    suite = """
    import pytest

    @pytest.mark.conveyor(clocks="manual")
    def test_one(conveyor_server): ...

    @pytest.mark.conveyor(clock="sundial")
    def test_two(conveyor_server): ...

    @pytest.mark.conveyor(clock="manual")
    def test_three(conveyor_shared): ...

    @pytest.mark.conveyor(settings={"colour": "red"})
    def test_four(conveyor_server): ...
    """
    done = run(tmp_path, suite, *WITHOUT_ASYNCIO)
    assert done.returncode == 1
    assert "4 errors" in done.stdout
    for told in ("the marker is conveyor(", "is system, manual or auto", "conveyor_shared_options"):
        assert told in done.stdout
    assert "colour" in done.stdout


def test_servers_leave_no_thread_socket_or_file(tmp_path: Path) -> None:
    suite = """
    import os, tempfile, threading
    from pathlib import Path
    import conveyor.testing
    from application import submit


    def state():
        links = [os.readlink(f"/dev/fd/{name}") for name in os.listdir("/dev/fd")
                 if os.path.islink(f"/dev/fd/{name}")]
        sockets = [link for link in links if link.startswith("socket:")]
        files = list(Path(tempfile.gettempdir()).glob("conveyor-*"))
        return threading.active_count(), len(sockets), files


    def test_nothing_is_left(tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        before = state()
        for clock in ("system", "manual"):
            with conveyor.testing.server(clock=clock) as server:
                submit(server, server.url("a", flaky=1))
                server.api.hang()
                server.drain()
                assert state() != before
        assert state() == before
    """
    assert_passed(run(tmp_path, suite, *WITHOUT_ASYNCIO), 1)


def test_the_examples_of_the_documentation_pass(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    chosen = [block for block in blocks if "def submit" in block or "def test_" in block]
    suite = "\n".join(["import pytest", *(block for block in chosen if "async" not in block)])
    assert_passed(run(tmp_path, suite, *WITHOUT_ASYNCIO), suite.count("def test_"))
