"""Large submits to a real server: followed to their end, or given up on the way."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from conveyor.service import task_lists
from conveyor.service.list_validation import ListValidator
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.disk import files_below
from tests.unit.large_api import children, large_body, tasks_of

DEADLINE = 60.0
MANY = 100_000


def http(server: ConveyorServer) -> httpx.Client:
    headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
    return httpx.Client(
        base_url=server.base_url, headers=headers, timeout=DEADLINE, trust_env=False
    )


def eventually_checking(count: int) -> None:
    """Wait until so many children are at work."""
    deadline = time.monotonic() + DEADLINE
    while len(children()) != count:
        assert time.monotonic() < deadline, f"{len(children())} children, not {count}"
        time.sleep(0.002)


def send_whole(server: ConveyorServer, body: bytes, key: str) -> socket.socket:
    """A connection on which a whole submit has been sent, and no answer read."""
    address = urlsplit(server.base_url)
    connection = socket.create_connection((address.hostname, address.port), timeout=DEADLINE)
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {server.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Idempotency-Key: {key}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def blobs_of(data: Path, kind: str) -> list[Path]:
    return list(files_below(data / "blobs" / kind))


@pytest.mark.slow
def test_a_large_submit_and_its_rerun_come_to_their_end(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with conveyor_server(data, async_threshold=100) as server, http(server) as client:
        tasks = [{"url": server.url(f"page/{number}")} for number in range(300)]
        body = json.dumps({"tasks": tasks, "odd": "x" * 300_000})
        submitted = client.post("/jobs", content=body)
        path = f"/jobs/{submitted.json()['job_id']}"
        server.drain(DEADLINE)
        first = client.get(path).json()["latest_run"]
        rows = client.get(f"{path}/results", params={"limit": "1000"}).json()["results"]
        rerun = client.post(f"{path}/rerun", headers={"Content-Type": ""})
        server.drain(DEADLINE)
        second = client.get(path).json()["latest_run"]
        until_nothing_is_staged(data)

    assert (submitted.status_code, rerun.status_code) == (202, 202)
    for answer in (submitted.json(), rerun.json()):
        assert answer["latest_run"]["ingest_status"] == "pending"
        assert answer["latest_run"]["stats"]["total"] == 300
    for run in (first, second):
        assert (run["status"], run["ingest_status"]) == ("completed", "done")
        assert run["stats"]["successful"] == 300
    assert [row["url"] for row in rows] == [task["url"] for task in tasks]
    assert first["run_id"] != second["run_id"]


def until_nothing_is_staged(data: Path) -> None:
    """It goes after the rows are said to be written, and their tasks may have ended by then."""
    deadline = time.monotonic() + DEADLINE
    while blobs_of(data, "staged"):
        assert time.monotonic() < deadline, "something is staged still"
        time.sleep(0.01)


def once_free(client: httpx.Client, body: bytes, key: str) -> httpx.Response:
    """The answer to a submit, repeated while the key is in use."""
    deadline = time.monotonic() + DEADLINE
    while True:
        answer = client.post("/jobs", content=body, headers={"Idempotency-Key": key})
        if answer.status_code != 409 or time.monotonic() > deadline:
            return answer
        time.sleep(0.01)


@pytest.mark.slow
def test_a_client_that_hangs_up_takes_the_check_with_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with conveyor_server(data) as server, http(server) as client:
        with send_whole(server, large_body(MANY), "order-1"):
            eventually_checking(1)
        eventually_checking(0)
        again = once_free(client, large_body(2, name="again"), "order-1")
        jobs = client.get("/jobs").json()["jobs"]

    assert again.status_code == 201, again.text
    assert [job["job_id"] for job in jobs] == [again.json()["job_id"]]
    assert blobs_of(data, "staged") == []


@contextmanager
def held_children(gate: Path) -> Iterator[Callable[[], None]]:
    """Children that begin to check when the function given is called, or at the exit."""
    program = (
        "import sys; open(sys.argv[1]).close(); from conveyor.intake.child import main; "
        "sys.exit(main())"
    )
    command = (sys.executable, "-P", "-c", program, str(gate))
    os.mkfifo(gate)
    with ExitStack() as stack:

        def let_go() -> None:
            # A reader waits to open it until somebody has it open for writing.
            stack.callback(os.close, os.open(gate, os.O_RDWR))

        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(task_lists, "ListValidator", partial(ListValidator, command=command))
        try:
            yield let_go
        finally:
            let_go()


@pytest.mark.slow
def test_two_lists_at_a_time_while_others_wait_and_are_served(tmp_path: Path) -> None:
    seen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.append(len(children()))
            time.sleep(0.002)

    with (
        held_children(tmp_path / "gate") as let_go,
        conveyor_server(tmp_path / "data") as server,
        http(server) as client,
        ExitStack() as connections,
    ):
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            body = json.dumps({"tasks": tasks_of(MANY // 2), "status": "open"}).encode()
            waiting = [
                connections.enter_context(send_whole(server, body, f"order-{number}"))
                for number in range(4)
            ]
            eventually_checking(2)
            for _ in range(20):
                assert client.get("/jobs/01K00000000000000000000000").status_code == 404
            answered, _, _ = select.select(waiting, [], [], 0)
            at_work = len(children())
            let_go()
            answers = [connection.recv(65_536) for connection in waiting]
        finally:
            ended.set()
            watcher.join()

    assert (answered, at_work) == ([], 2)
    assert max(seen) == 2
    assert [answer.split(b" ", 2)[1] for answer in answers] == [b"202"] * 4


@pytest.mark.slow
def test_a_server_that_ends_leaves_no_child(tmp_path: Path) -> None:
    with conveyor_server(tmp_path / "data") as server:
        connection = send_whole(server, large_body(MANY), "order-1")
        eventually_checking(1)

    connection.close()
    assert children() == []
