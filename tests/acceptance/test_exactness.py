"""Counters, rows and pages are exact at every read, whatever happens at the same moment."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from conveyor.testing.fleet import RoleFleet
from conveyor.testing.process import ServerProcess
from tests.acceptance.support_bindings import DEVELOPMENT, FLEET, rows_written
from tests.acceptance.support_data import rows_of, server
from tests.acceptance.support_wire import Wire, eventually, target, together

pytestmark = pytest.mark.server


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the tests; emulators answer some hundred calls a second."""

    mixed: int
    page_sizes: Sequence[int]
    page_delay: float
    filtered_sizes: Sequence[int]
    adders: tuple[int, int, int]
    crossing_jobs: int
    dry: int


SIZES = {
    DEVELOPMENT: Sizes(
        mixed=5_000,
        page_sizes=range(1, 51),
        page_delay=0.05,
        filtered_sizes=(1, 7, 50),
        adders=(20, 10, 10),
        crossing_jobs=25,
        dry=20,
    ),
    FLEET: Sizes(
        mixed=120,
        page_sizes=(1, 2, 3, 7, 20, 50),
        page_delay=0.1,
        filtered_sizes=(7, 50),
        adders=(6, 3, 8),
        crossing_jobs=6,
        dry=6,
    ),
}
MIXTURE: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({"delay": 0.02}, None),
    ({}, None),
    ({"flaky": 1}, None),
    ({"delay": 0.05}, None),
    ({"status": 404}, "bad_target"),
    ({"status": 403}, "blocked"),
    ({"status": 500}, "gateway_error"),
    ({"status": 504, "delay": 0.01}, "timeout"),
    ({"flaky": 1, "status": 401}, "auth_failed"),
    ({"status": 418}, "other"),
)
"""The answers that every tenth task asks of the gateway, and the reason for its failure."""
FILTERS = ("successful", "failed", "processing")
SOURCES = ("job", "run", "runs", "list", "results")
"""The sources from which a run is read."""
ROUNDS = 5
"""Runs that are tried at most, until something has happened while they went on."""


@pytest.fixture(scope="module")
def booted(
    binding: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess | RoleFleet]:
    if binding == FLEET:
        yield request.getfixturevalue("shared_fleet")
        return
    directory = tmp_path_factory.mktemp("exactness")
    with server(directory, "--gateway", "fake", retry_base=0.01, discovery_interval=600) as process:
        yield process


@pytest.fixture
def sizes(binding: str) -> Sizes:
    return SIZES[binding]


@pytest.fixture
def wire(booted: ServerProcess | RoleFleet) -> Iterator[Wire]:
    with Wire(booted.api if isinstance(booted, RoleFleet) else booted.info.api) as wire:
        yield wire


class Watch:
    """Every read of one run, by many threads, held against every read that ended before it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._lock = Lock()
        self._completed = 0
        self._over = False
        self.reads: Counter[str] = Counter()

    @property
    def completed(self) -> int:
        return self._completed

    @property
    def over(self) -> bool:
        return self._over

    def check(self, source: str, run: Any, *, least: int, was_over: bool) -> None:
        """`least` and `was_over` are what had been seen when this read began."""
        stats = run["stats"]
        told = (source, run)
        assert stats["completed"] == stats["successful"] + stats["failed"], told
        assert least <= stats["completed"] <= stats["total"] == self._total, (least, told)
        assert sum(stats.get("failure_reasons", {}).values()) == stats["failed"], told
        is_over = stats["completed"] == stats["total"]
        assert run["status"] == ("completed" if is_over else "running"), told
        assert is_over or not was_over, told
        with self._lock:
            self.reads[source] += 1
            self._completed = max(self._completed, stats["completed"])
            self._over = self._over or is_over


@pytest.mark.guarantee("G4")
def test_every_read_of_a_mixed_run_is_exact(wire: Wire, binding: str, sizes: Sizes) -> None:
    reads: Counter[str] = Counter()
    # A machine that is busy may end a run before anybody has read it often.
    for number in range(ROUNDS):
        reads += read_to_the_end(wire, binding, sizes.mixed, name=f"mixed/{number}")
        if len(reads) == len(SOURCES) and reads.total() > 50:
            return
    raise AssertionError(reads)


def read_to_the_end(wire: Wire, binding: str, total: int, *, name: str) -> Counter[str]:
    """Work a mixed run while it is read from all sides; how often it was."""
    urls = [target(f"{name}/{number}", **MIXTURE[number % 10][0]) for number in range(total)]
    job = wire.submit(urls, max_inflight=50, max_attempts=2)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    watch = Watch(total)

    def read(source: str) -> Any:
        if source == "job":
            return wire.latest_run(job_id)
        if source == "run":
            return wire.ask("GET", f"/jobs/{job_id}/runs/{run_id}")
        if source == "runs":
            return wire.ask("GET", f"/jobs/{job_id}/runs")["runs"][0]
        [listed] = [one for one in wire.ask("GET", "/jobs")["jobs"] if one["job_id"] == job_id]
        return listed["latest_run"]

    def poll(source: str) -> None:
        while not watch.over:
            least, was_over = watch.completed, watch.over
            watch.check(source, read(source), least=least, was_over=was_over)

    def enumerate_rows() -> None:
        while not watch.over:
            least = watch.completed
            rows = wire.rows(job_id)
            ended = sum(row["status"] in ("successful", "failed") for row in rows)
            assert [row["url"] for row in rows] == urls
            assert least <= ended
            # A fleet counts what has ended in groups, after the rows: never too many.
            if binding == DEVELOPMENT:
                assert ended <= read("run")["stats"]["completed"]
            watch.reads["results"] += 1

    with ThreadPoolExecutor(5) as pool:
        polls = [pool.submit(poll, source) for source in SOURCES[:-1]]
        polls.append(pool.submit(enumerate_rows))
        for one in polls:
            one.result(timeout=100)

    last = read("job")
    assert [read("run"), read("runs"), read("list")] == [last, last, last]
    expected = Counter(reason for _, reason in MIXTURE if reason is not None)
    assert last["stats"]["failure_reasons"] == {
        reason: count * total // 10 for reason, count in expected.items()
    }
    assert_rows_match(wire, job_id, urls, last["stats"])
    return watch.reads


def assert_rows_match(wire: Wire, job_id: str, urls: list[str], stats: Any) -> None:
    """Each task has one row, in submission order, and the filters partition the rows."""
    rows = wire.rows(job_id)
    assert [row["url"] for row in rows] == urls
    assert len({row["task_id"] for row in rows}) == len(urls)
    parts = {status: wire.rows(job_id, status=status) for status in FILTERS}
    assert len(parts["successful"]) == stats["successful"]
    assert len(parts["failed"]) == stats["failed"]
    assert parts["processing"] == []
    merged = [row["task_id"] for part in parts.values() for row in part]
    assert sorted(merged) == [row["task_id"] for row in rows]


@pytest.mark.guarantee("G13")
def test_pages_of_every_size_give_each_row_once_while_tasks_finish(
    wire: Wire, sizes: Sizes
) -> None:
    wanted = min(5, len(sizes.page_sizes) // 2)
    finished_meanwhile = 0
    # A machine that is busy may end a run before it has been read in pages of many sizes.
    for number in range(ROUNDS):
        finished_meanwhile += read_in_pages(wire, sizes, name=f"page/{number}")
        if finished_meanwhile >= wanted:
            return
    raise AssertionError(finished_meanwhile)


def read_in_pages(wire: Wire, sizes: Sizes, *, name: str) -> int:
    """Read a run in pages of every size; during how many of these readings tasks have ended."""
    urls = [target(f"{name}/{number}", delay=sizes.page_delay) for number in range(120)]
    job_id = wire.submit(urls, max_inflight=2)["job_id"]
    finished_meanwhile = 0
    for size in sizes.page_sizes:
        before = wire.latest_run(job_id)["stats"]["completed"]
        pages = list(wire.pages(job_id, limit=size))
        rows = [row for page in pages for row in page]
        after = wire.latest_run(job_id)["stats"]["completed"]
        assert [row["url"] for row in rows] == urls, size
        assert [len(page) for page in pages[:-1]] == [size] * (len(pages) - 1)
        assert 0 < len(pages[-1]) <= size
        finished_meanwhile += after > before
    wire.ended(job_id)
    for size in sizes.filtered_sizes:
        parts = [row for one in FILTERS for row in wire.rows(job_id, status=one, limit=size)]
        assert [row["url"] for row in parts] == urls
    return finished_meanwhile


@pytest.mark.guarantee("G2")
def test_parallel_adds_share_no_index_and_lose_none(
    wire: Wire, booted: ServerProcess | RoleFleet, sizes: Sizes
) -> None:
    threads, adds, size = sizes.adders
    job_id = wire.submit([], status="open")["job_id"]

    def add(thread: int) -> list[tuple[bytes, list[str]]]:
        draw = random.Random(thread)
        answers = []
        for number in range(adds):
            urls = [target(f"add/{thread}/{number}/{index}") for index in range(size)]
            body = {"tasks": [{"url": url} for url in urls]}
            key, path = f"add-{thread}-{number}", f"/jobs/{job_id}/tasks"
            first = wire.send("POST", path, body=body, key=key)
            assert first.status_code == 200, first.text
            for _ in range(draw.choice((0, 0, 1, 2))):
                again = wire.send("POST", path, body=body, key=key)
                assert (again.status_code, again.content) == (200, first.content)
                assert again.headers["Idempotency-Replayed"] == "true"
            answers.append((first.content, urls))
        return answers

    answers = [answer for thread in together(threads, add) for answer in thread]
    wire.ask("POST", f"/jobs/{job_id}/close")
    stats = wire.ended(job_id)["stats"]
    wanted = threads * adds * size
    assert (stats["total"], stats["successful"]) == (wanted, wanted)
    rows = wire.rows(job_id)
    position = {row["url"]: index for index, row in enumerate(rows)}
    assert len(rows) == len(position) == wanted
    for _, urls in answers:
        first = position[urls[0]]
        assert [position[url] for url in urls] == list(range(first, first + size))
    if isinstance(booted, RoleFleet):
        assert rows_written(booted, rows[0]["run_id"]) == wanted
        return
    stored = rows_of(
        Path(booted.info.data_dir),
        "WITH indexes AS (SELECT task_key & 34359738367 AS place FROM tasks JOIN runs "
        "ON task_key >> 35 >= run_no AND task_key >> 35 < run_no + shard_count WHERE job_id = ?) "
        "SELECT count(DISTINCT place), max(place) - min(place) + 1 FROM indexes",
        job_id,
    )
    assert stored == [(wanted, wanted)]


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("way", ["close", "last_batch"])
def test_the_end_of_input_crossing_the_last_task_leaves_no_run_hanging(
    wire: Wire, way: str, sizes: Sizes
) -> None:
    """Discovery is off in the development server, so that nothing but the crossing writers can
    help."""
    workers, jobs = 4, sizes.crossing_jobs

    def cross(worker: int) -> list[tuple[str, int]]:
        draw = random.Random(f"{way}-{worker}")
        made = []
        for number in range(jobs):
            count = draw.choice((1, 1, 2))
            pause = draw.random() * 0.006
            urls = [target(f"{way}/{worker}/{number}/{one}", delay=pause) for one in range(count)]
            job_id = wire.submit(urls, status="open")["job_id"]
            time.sleep(draw.random() * 0.006)  # the moment is what the test varies
            if way == "close":
                wire.ask("POST", f"/jobs/{job_id}/close")
            else:
                more = {"tasks": [{"url": target(f"last/{worker}/{number}")}], "last_batch": True}
                wire.ask("POST", f"/jobs/{job_id}/tasks", body=more)
                count += 1
            made.append((job_id, count))
        return made

    for job_id, count in (one for made in together(workers, cross) for one in made):
        run = wire.ended(job_id, timeout=60)
        assert run["status"] == "completed"
        assert run["stats"]["successful"] == run["stats"]["total"] == count
        assert wire.ask("GET", f"/jobs/{job_id}")["status"] == "closed"


def test_an_open_job_that_ran_dry_works_again_and_then_closes(wire: Wire, sizes: Sizes) -> None:
    job_id = wire.submit([target("dry/0")], status="open")["job_id"]
    for number in range(1, sizes.dry):

        def is_dry(done: int = number) -> bool | None:
            run = wire.latest_run(job_id)
            return (run["status"], run["stats"]["completed"]) == ("pending", done) or None

        eventually(is_dry, "the run has nothing to do")
        wire.ask(
            "POST", f"/jobs/{job_id}/tasks", body={"tasks": [{"url": target(f"dry/{number}")}]}
        )
    wire.ask("POST", f"/jobs/{job_id}/close")
    assert wire.ended(job_id)["stats"]["successful"] == sizes.dry
