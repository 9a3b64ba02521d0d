"""Measures the cost of a job of many tasks: to take in, to write, to have waiting.

A CSV file is uploaded and submitted with the limits raised, once for each size. Meanwhile another
client asks for a job every few milliseconds, and the resident memory of the server and of its
children is sampled. `validate` is from the submit to its 202, `ingest` from there until every row
is written, with the run paused, so that nothing else runs. The row `inline` sends its tasks in the
request.

A second measurement starts the workers on a slow fake gateway: the tasks per second that end while
the rest is still being written, against those afterwards.
"""

from __future__ import annotations

import csv
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bench.conveyor_server import API_KEY, ConveyorServer
from bench.fake_targets import small
from bench.harness import Figure, Options, Row, Scenario, wait_until
from bench.processes import memory, tree

SIZES = (10_000, 100_000, 1_000_000)
INLINE = 100_000
PACE = 0.005
LIMITS = {"max_input_rows": 2_000_000, "max_input_bytes": 500_000_000}
PATIENCE = 900.0
SETTLE = 3.0
WORKED = 10.0


class Bystander:
    """Another client, and the time of its requests while a large job is taken in."""

    def __init__(self, server: ConveyorServer) -> None:
        self._server = server
        self.milliseconds: list[float] = []
        self.peak_rss = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Send requests, and sample memory, until the block ends."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._ask, args=(stop,)),
            threading.Thread(target=self._sample, args=(stop,)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    @property
    def p95(self) -> float:
        """Return the 95th percentile in milliseconds."""
        ordered = sorted(self.milliseconds)
        return ordered[int(len(ordered) * 0.95)] if ordered else 0.0

    def _ask(self, stop: threading.Event) -> None:
        connection = http.client.HTTPConnection(self._server.address, timeout=60)
        while not stop.wait(PACE):
            started = time.perf_counter()
            connection.request("GET", "/v1/jobs?limit=1", headers={"X-API-Key": API_KEY})
            connection.getresponse().read()
            self.milliseconds.append((time.perf_counter() - started) * 1e3)
        connection.close()

    def _sample(self, stop: threading.Event) -> None:
        while not stop.wait(0.05):
            resident = sum(memory(pid, "VmRSS") for pid in tree(self._server.child.pid))
            self.peak_rss = max(self.peak_rss, resident)


def write_csv(path: Path, count: int, url: str | None = None) -> None:
    """Write a file with a URL and an external id in each row."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        for number in range(count):
            writer.writerow([url or f"https://shop.example.com/item/{number}", f"sku-{number}"])


def upload(server: ConveyorServer, path: Path) -> str:
    """Put a file into a slot; return its id."""
    spec = {"type": "csv", "csv": {"fields": {"url": 0, "external_id": 1}}}
    slot = server.call("POST", "/job_inputs", json.dumps(spec).encode())
    target = urlsplit(slot["upload"]["url"])
    connection = http.client.HTTPConnection(target.netloc, timeout=120)
    with path.open("rb") as body:
        headers = {**slot["upload"]["headers"], "Content-Length": str(path.stat().st_size)}
        connection.request("PUT", f"{target.path}?{target.query}", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"PUT: {answer.status} {answer.read()[:300]!r}")
        answer.read()
    connection.close()
    file_input_id: str = slot["file_input_id"]
    return file_input_id


def wait_for_rows(server: ConveyorServer, job_id: str) -> float:
    """Wait until every row is written; return the moment."""
    return wait_until(
        lambda: server.latest_run(job_id)["ingest_status"] == "done",
        seconds=PATIENCE,
        pause=0.02,
    )


def take_in(server: ConveyorServer, name: str, size: int, body: bytes) -> Row:
    """Submit, with the run paused at once, and wait until it is written."""
    idle = server.resident_bytes()
    bystander = Bystander(server)
    with bystander.watching():
        started = time.perf_counter()
        job_id = server.call("POST", "/jobs", body)["job_id"]
        accepted = time.perf_counter()
        p95_submit = bystander.p95
        server.call("POST", f"/jobs/{job_id}/pause")
        written = wait_for_rows(server, job_id)
    time.sleep(SETTLE)
    assert server.latest_run(job_id)["stats"]["total"] == size
    figures: dict[str, Figure] = {
        "s to 202": round(accepted - started, 2),
        "validated/s": round(size / (accepted - started)),
        "others p95 ms": round(p95_submit, 1),
        "ingested/s": round(size / (written - accepted)),
        "others p95 ms, whole": round(bystander.p95, 1),
        "idle RSS MB": round(idle / 2**20),
        "peak RSS MB, children too": round(bystander.peak_rss / 2**20),
        "RSS MB, all waiting": round(server.resident_bytes() / 2**20),
    }
    return Row(name, figures)


def measure_file(options: Options, size: int) -> Row:
    """Take in a file of `size` rows."""
    directory = options.directory("ingest")
    path = directory / "tasks.csv"
    write_csv(path, size)
    with ConveyorServer(directory / "data", "--gateway", "fake", settings=LIMITS) as server:
        body = {"type": "regular", "file_input_id": upload(server, path), "async": True}
        return take_in(server, f"file of {size:,}", size, json.dumps(body).encode())


def measure_inline(options: Options, size: int) -> Row:
    """Take in `size` tasks by one request."""
    directory = options.directory("inline")
    tasks = [
        {"url": f"https://shop.example.com/item/{number}", "external_id": f"sku-{number}"}
        for number in range(size)
    ]
    body = json.dumps({"type": "regular", "tasks": tasks}).encode()
    with ConveyorServer(directory / "data", "--gateway", "fake", settings=LIMITS) as server:
        return take_in(server, f"inline, {size:,}", size, body)


def measure_work(options: Options, size: int) -> Row:
    """Measure the tasks per second that end while rows are being written, and afterwards."""
    directory = options.directory("work")
    path = directory / "tasks.csv"
    write_csv(path, size, small(0))
    with ConveyorServer(directory / "data", "--gateway", "fake", settings=LIMITS) as server:
        body = {"type": "regular", "file_input_id": upload(server, path)}
        job_id = server.call("POST", "/jobs", json.dumps(body).encode())["job_id"]
        began, before = time.perf_counter(), _ended(server, job_id)
        written = wait_for_rows(server, job_id)
        during = (_ended(server, job_id) - before) / (written - began)
        time.sleep(1.0)
        began, before = time.perf_counter(), _ended(server, job_id)
        time.sleep(WORKED)
        after = (_ended(server, job_id) - before) / (time.perf_counter() - began)
        server.call("POST", f"/jobs/{job_id}/stop")
    return Row(
        f"worked, {size:,}",
        {
            "tasks/s while written": round(during),
            "tasks/s afterwards": round(after),
            "ratio": round(during / after, 2),
        },
    )


def _ended(server: ConveyorServer, job_id: str) -> int:
    completed: int = server.latest_run(job_id)["stats"]["completed"]
    return completed


def run(options: Options) -> list[Row]:
    """Measure every size up to the requested one, the inline one, and the workers' rate."""
    rows = [
        measure_file(options, size)
        for size in SIZES
        if size <= options.tasks and options.wants("file")
    ]
    if options.wants("inline"):
        rows.append(measure_inline(options, min(INLINE, options.tasks)))
    if options.wants("work"):
        rows.append(measure_work(options, options.tasks))
    return rows


SCENARIO = Scenario(name="ingest", run=run)
