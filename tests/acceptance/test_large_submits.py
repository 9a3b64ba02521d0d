"""The sizes that are promised: a hundred thousand tasks in one request, a million in one file."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.acceptance.support_boot import Booted, boot

pytestmark = [pytest.mark.guarantee("G18"), pytest.mark.full, pytest.mark.server]

MIB = 1_024 * 1_024
INLINE = 100_000
IN_A_FILE = 1_000_000


class Memory:
    """The most that a server and its children have held together, over what it held at first."""

    def __init__(self, server: Booted) -> None:
        self._server = server
        self._idle = server.memory("VmRSS")
        self._ended = threading.Event()
        self.grown = 0
        self.children = 0

    def watch(self) -> None:
        while not self._ended.wait(0.01):
            children = self._children()
            self.children = max(self.children, len(children))
            total = self._server.memory("VmRSS") + sum(map(_resident, children))
            self.grown = max(self.grown, total - self._idle)

    def end(self) -> None:
        self._ended.set()

    def _children(self) -> list[int]:
        lists = Path(f"/proc/{self._server.pid}/task").glob("*/children")
        return [int(pid) for path in lists for pid in _text(path).split()]


@contextmanager
def watched(server: Booted) -> Iterator[Memory]:
    memory = Memory(server)
    watcher = threading.Thread(target=memory.watch)
    watcher.start()
    try:
        yield memory
    finally:
        memory.end()
        watcher.join()


def _resident(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", _text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return int(found[1]) * 1_024 if found is not None else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def http(server: Booted) -> httpx.Client:
    return httpx.Client(
        base_url=server.api, headers={"X-API-Key": "key"}, timeout=60, trust_env=False
    )


def test_a_hundred_thousand_inline_tasks_cost_little_memory(tmp_path: Path) -> None:
    tasks = [{"url": f"http://fake.test/page/{number}"} for number in range(INLINE)]
    body = json.dumps({"tasks": tasks}).encode()
    with boot(tmp_path, gateway="fake") as server, http(server) as client:
        client.get("/jobs")
        with watched(server) as memory:
            answer = client.post(
                "/jobs", content=body, headers={"Content-Type": "application/json"}
            )
            job = answer.json()
            client.post(f"/jobs/{job['job_id']}/stop")

    assert answer.status_code == 202
    assert job["latest_run"]["stats"]["total"] == INLINE
    assert memory.children == 1
    assert memory.grown < 200 * MIB


def test_a_million_tasks_in_a_file_cost_no_more(tmp_path: Path) -> None:
    limits = {"max_input_rows": IN_A_FILE, "max_input_bytes": 100 * MIB}
    content = b"".join(b"http://fake.test/page/%d\n" % number for number in range(IN_A_FILE))
    with boot(tmp_path, gateway="fake", **limits) as server, http(server) as client:
        slot = client.post("/job_inputs", json={"type": "urls"}).json()
        upload = slot["upload"]
        put = httpx.put(
            upload["url"], content=content, headers=upload["headers"], trust_env=False, timeout=60
        )
        with watched(server) as memory:
            answer = client.post("/jobs", json={"file_input_id": slot["file_input_id"]})
            job = answer.json()
            client.post(f"/jobs/{job['job_id']}/stop")

    assert put.is_success, put.text
    assert answer.status_code == 202
    assert job["latest_run"]["stats"]["total"] == IN_A_FILE
    assert memory.children == 1
    assert memory.grown < 200 * MIB
