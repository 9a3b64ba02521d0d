"""Walk with one URL: print the files of the package in which a function ran, one a line.

The development binding with the fake gateway gets one task over ASGI. The walk polls until the run
is completed, and reads the results and the content. Start-up is not counted.
"""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
import httpx

from conveyor.bootstrap import open_dev
from conveyor.clock import SystemClock
from conveyor.settings import load
from tests.architecture.source import PACKAGE, ROOT

ORIGIN = "http://127.0.0.1:9000"
WALKS = 5
DEADLINE_SECONDS = 60.0
AFTERWARDS_SECONDS = 2.0
"""The trace goes on for so long after the content is read, so that the acknowledgement of the
message and the next look for callbacks are always part of it."""


class Trace:
    """Collects the code that runs, in every thread that starts after `install`, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self._codes: set[CodeType] = set()

    def install(self) -> None:
        """Watch this thread and every thread that it starts."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.on and event == "call":
            self._codes.add(frame.f_code)

    def files(self, package: Path) -> list[str]:
        """Return the files below a package in which a function ran, relative to its parent.

        The bodies of modules and classes are not functions: they run when something is imported.
        """
        found = {
            Path(code.co_filename) for code in self._codes if code.co_flags & inspect.CO_OPTIMIZED
        }
        inside = (path for path in found if path.is_relative_to(package))
        return sorted(path.relative_to(package.parent).as_posix() for path in inside)


async def walk(trace: Trace, data_dir: Path) -> None:
    """Take one URL from its POST to its content, and trace that."""
    settings = load({}, data_dir=str(data_dir), gateway="fake", outbox_interval=0.5)
    runtime = await open_dev(settings, SystemClock(), origin=ORIGIN)

    async def work() -> None:
        await runtime.worker.run(grace=5.0)

    transport = httpx.ASGITransport(app=runtime.app)
    client = httpx.AsyncClient(
        transport=transport, base_url=ORIGIN, headers={"X-API-Key": "key-of-alice"}
    )
    try:
        async with client, anyio.create_task_group() as group:
            group.start_soon(work)
            await anyio.sleep(0.5)
            trace.on = True
            with anyio.fail_after(DEADLINE_SECONDS):
                await _take_one_url(client)
            await anyio.sleep(AFTERWARDS_SECONDS)
            trace.on = False
            runtime.worker.stop()
    finally:
        await runtime.aclose()


async def _take_one_url(client: httpx.AsyncClient) -> None:
    job = await _json(client, "POST", "/v1/jobs", {"tasks": [{"url": "https://site.test/1"}]})
    run = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    await _completed(client, run)
    (result,) = (await _json(client, "GET", f"{run}/results"))["results"]
    content = await client.get(result["result_url"])
    assert content.status_code == 200, content.text
    assert content.content


async def _completed(client: httpx.AsyncClient, run: str) -> None:
    while True:
        if (await _json(client, "GET", run))["status"] == "completed":
            return
        await anyio.sleep(0.05)


async def _json(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    answer = await client.request(method, path, json=body)
    assert answer.is_success, f"{method} {path} answered {answer.status_code}: {answer.text}"
    return answer.json()


def files_one_url_passes(*, most: int | None = None) -> list[str]:
    """Return the files that one URL passes in every one of several walks; of more walks, where
    these are more than `most`.

    Each walk is a process of its own. What a race adds to some of them (a look into a queue that
    has just been dropped) does not count. On a busy machine it may be lost in the first ones alike.
    """
    with ThreadPoolExecutor(WALKS) as pool:
        walks = list(pool.map(lambda _: _files_of_one_walk(), range(WALKS)))
    passed = set.intersection(*walks)
    more = 0 if most is None else WALKS
    while more and len(passed) > (most or 0):
        passed &= _files_of_one_walk()
        more -= 1
    return sorted(passed)


def _files_of_one_walk() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.architecture.walk"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the walk of one URL failed:\n{done.stderr}")
    return set(done.stdout.split())


def main() -> None:
    """Trace one URL and print its files."""
    logging.disable(logging.WARNING)
    trace = Trace()
    trace.install()
    with tempfile.TemporaryDirectory() as directory:
        anyio.run(walk, trace, Path(directory) / "data")
    sys.setprofile(None)
    print("\n".join(trace.files(ROOT / PACKAGE)))


if __name__ == "__main__":
    main()
