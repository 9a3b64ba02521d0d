"""A run that is watched is read once for all who watch, and each of them learns the truth."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from conveyor.aio.outages import Outage
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Run
from conveyor.ports.binding import Runs
from conveyor.ports.gateway import Shared
from conveyor.ports.records import ChangedRun
from conveyor.service import Service, ServiceOptions
from conveyor.service.progress import (
    BEAT,
    LISTED,
    PACE,
    POLL,
    RunSnapshot,
    StreamWord,
    Watcher,
)
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import KEY, ORIGIN, Api, open_api

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


STEP = 0.05
"""Seconds by which the tests move time."""


@dataclass
class Reader:
    """A reader of one stream, and what it was told."""

    watcher: Watcher
    words: list[RunSnapshot | StreamWord] = field(default_factory=list)
    ended: bool = False

    async def read(self) -> None:
        with self.watcher:
            async for word in self.watcher.words():
                self.words.append(word)
        self.ended = True

    @property
    def snapshots(self) -> list[RunSnapshot]:
        return [word for word in self.words if isinstance(word, RunSnapshot)]

    @property
    def stats(self) -> list[tuple[int, int]]:
        """Return the completed tasks and the total of each snapshot."""
        bodies = [json.loads(snapshot.body)["stats"] for snapshot in self.snapshots]
        return [(stats["completed"], stats["total"]) for stats in bodies]


class CountingRuns:
    """The runs of a binding, with a count of the reads of one by its id. `busy` reads are under
    way."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.reads = 0
        self.busy = 0
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runs, name)

    async def get_run(self, caller: str, job_id: str, run_id: str | None) -> Run | None:
        self.reads += 1
        if self.fails:
            raise OSError("the disk is away")
        with self._counted():
            return await self._runs.get_run(caller, job_id, run_id)

    async def changed_runs(self, caller: str | None, **limits: Any) -> list[ChangedRun]:
        with self._counted():
            return await self._runs.changed_runs(caller, **limits)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


@dataclass
class World:
    """A service that follows runs, over a real store and a clock that the test moves."""

    api: Api
    service: Service
    clock: FakeClock
    runs: CountingRuns
    outages: list[Outage]
    group: TaskGroup

    @property
    def caller(self) -> str:
        return self.service.identify(KEY).caller_id

    async def watch(self, job: dict[str, Any], *, caller: str | None = "") -> Reader:
        """Begin to read the stream of a job's latest run."""
        run_id = job["latest_run"]["run_id"]
        caller = self.caller if caller == "" else caller
        return self.begin(await self.service.progress.watch_run(caller, job["job_id"], run_id))

    def begin(self, watcher: Watcher) -> Reader:
        reader = Reader(watcher)
        self.group.start_soon(reader.read)
        return reader

    async def passes(self, seconds: float) -> None:
        """Move time on, and let each read of the store end at the instant at which it began."""
        end = self.clock.monotonic() + seconds
        while (left := end - self.clock.monotonic()) > 0:
            await self.clock.advance(min(left, STEP))
            while self.runs.busy:
                await anyio.lowlevel.checkpoint()

    async def until(self, condition: Callable[[], bool], *, limit: float = 60.0) -> None:
        """Move time on until this holds."""
        end = self.clock.monotonic() + limit
        while not condition() and self.clock.monotonic() < end:
            await self.passes(STEP)
        assert condition()


@asynccontextmanager
async def world(directory: Path, *, polls: bool = False, **options: Any) -> AsyncIterator[World]:
    """A service over a fresh directory; one that `polls` is told of no writes."""
    clock = FakeClock()
    async with open_api(directory, clock=clock, **options) as api:
        runs: Any = CountingRuns(api.binding.runs)
        outages: list[Outage] = []
        binding = replace(
            api.binding, runs=runs, run_writes=None if polls else api.binding.run_writes
        )
        service = Service(
            binding,
            ServiceOptions(public_origin=ORIGIN, **options),
            clock,
            webhooks=api.webhooks,
            outages=lambda: outages,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(service.progress.run)
            yield World(api, service, clock, runs, outages, group)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(service.progress.end)
            await clock.advance(5.0)
            group.cancel_scope.cancel()


async def worked(world: World, job: dict[str, Any]) -> None:
    """Let every task of a job bring back a body, and time pass in between."""
    run_id = job["latest_run"]["run_id"]
    for task in await world.api.tasks_of(run_id):
        await world.api.succeed(job["job_id"], run_id, task.task_id)
        await world.passes(0.1)


async def reads_of(directory: Path, watchers: int, *, polls: bool) -> int:
    """Count the reads of a run that so many watch to its end; each of them learns the truth."""
    limits = {"max_streams": 1_000, "max_caller_streams": 1_000}
    async with world(directory, polls=polls, **limits) as served:
        job = await served.api.submit(20)
        readers = [await served.watch(job) for _ in range(watchers)]
        await worked(served, job)
        await served.until(lambda: all(reader.ended for reader in readers))
        for reader in readers:
            assert reader.snapshots[-1].ended
            assert reader.stats[-1] == (20, 20)
            assert reader.stats == sorted(reader.stats)
            assert all(completed <= total for completed, total in reader.stats)
        return served.runs.reads


@pytest.mark.slow
@pytest.mark.parametrize("polls", [False, True])
async def test_many_watchers_cost_the_reads_of_one(tmp_path: Path, polls: bool) -> None:
    counts = (1, 100, 1_000)
    reads = [await reads_of(tmp_path / str(count), count, polls=polls) for count in counts]
    assert max(reads) <= 1.1 * min(reads), reads


async def test_a_snapshot_is_the_answer_to_get_and_is_encoded_once(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(2)
        first, second = await served.watch(job), await served.watch(job)
        await served.until(lambda: bool(first.words and second.words))
        path = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
        assert first.snapshots[0].body + b"\n" == (await served.api.client.get(path)).content
        assert first.snapshots[0] is second.snapshots[0]


async def test_a_run_that_nobody_watches_is_not_read(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        watched, other = await served.api.submit(1), await served.api.submit(20)
        reader = await served.watch(watched)
        await served.until(lambda: bool(reader.words))
        before = served.runs.reads
        await worked(served, other)
        assert served.runs.reads == before
        assert len(reader.words) == 1


@pytest.mark.parametrize("polls", [False, True])
async def test_a_watcher_that_leaves_ends_the_reads(tmp_path: Path, polls: bool) -> None:
    async with world(tmp_path, polls=polls) as served:
        job = await served.api.submit(20)
        with await served.service.progress.watch_run(
            served.caller, job["job_id"], job["latest_run"]["run_id"]
        ):
            assert served.service.progress.streams == 1
        assert served.service.progress.streams == 0
        before = served.runs.reads
        await worked(served, job)
        assert served.runs.reads == before


@pytest.mark.slow
async def test_at_most_four_snapshots_come_a_second(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(100)
        run_id = job["latest_run"]["run_id"]
        reader = await served.watch(job)
        began = served.clock.monotonic()
        for task in await served.api.tasks_of(run_id):
            await served.api.succeed(job["job_id"], run_id, task.task_id)
            await served.passes(0.02)
        await served.until(lambda: reader.ended)
        most = (served.clock.monotonic() - began) / PACE + 2
        assert 3 < len(reader.snapshots) <= most


async def test_where_nobody_tells_of_writes_a_run_is_read_once_a_second(tmp_path: Path) -> None:
    async with world(tmp_path, polls=True) as served:
        job = await served.api.submit(1)
        await served.watch(job)
        before = served.runs.reads
        await served.passes(10 * POLL)
        assert 9 <= served.runs.reads - before <= 11


async def test_a_slow_reader_gets_the_newest_snapshot_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(10)
        quick = await served.watch(job)
        slow = await served.service.progress.watch_run(
            served.caller, job["job_id"], job["latest_run"]["run_id"]
        )
        await worked(served, job)
        await served.until(lambda: quick.ended)
        assert len(quick.snapshots) > 2
        late = served.begin(slow)
        await served.until(lambda: late.ended)
        assert late.snapshots == [quick.snapshots[-1]]


async def test_an_ended_run_is_told_once_and_not_followed(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(1)
        await served.api.drain(job)
        reader = await served.watch(job)
        await served.until(lambda: reader.ended)
        assert [snapshot.ended for snapshot in reader.snapshots] == [True]
        before = served.runs.reads
        await served.passes(5.0)
        assert served.runs.reads == before


async def test_a_job_that_is_deleted_ends_its_streams(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(1)
        reader = await served.watch(job)
        await served.api.client.delete(f"/v1/jobs/{job['job_id']}")
        await served.until(lambda: reader.ended)
        assert reader.snapshots[-1].status == "deleted"


async def test_numbers_grow_over_restarts_and_over_a_clock_that_was_set_back(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(3)
        run_id = job["latest_run"]["run_id"]
        reader = await served.watch(job)
        await worked(served, job)
        await served.until(lambda: reader.ended)
        numbers = [snapshot.number for snapshot in reader.snapshots]
        assert numbers == sorted(set(numbers))
        last = numbers[-1] + 5_000
        again = served.begin(
            await served.service.progress.watch_run(served.caller, job["job_id"], run_id, last=last)
        )
        await served.until(lambda: again.ended)
        assert again.snapshots[0].number > last


@pytest.mark.slow
async def test_a_silent_stream_says_something_each_fifteen_seconds(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        reader = await served.watch(await served.api.submit(1))
        await served.passes(4 * BEAT + 1)
        assert 3 <= reader.words.count(StreamWord.BEAT) <= 4


@pytest.mark.slow
async def test_a_reader_who_is_not_accepted_any_more_is_told_nothing_further(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as served:
        api, accepted = served.api, [True]
        job = await api.submit(2)
        readers = [await served.watch(job), await served.watch(await api.submit(1))]
        for reader in readers:
            reader.watcher.accepted = lambda: accepted[0]
        await served.passes(POLL)
        accepted[0] = False
        [first, _] = await api.tasks_of(job["latest_run"]["run_id"])
        await api.fail(first.run_id, first.task_id)
        await served.passes(POLL)
        assert [len(reader.snapshots) for reader in readers] == [1, 1]
        assert [len(reader.words) for reader in readers] == [2, 1]
        await served.passes(BEAT)
        assert [reader.words[-1] for reader in readers] == [StreamWord.BYE] * 2
        assert served.service.progress.streams == 0


@pytest.mark.slow
async def test_a_stream_tells_of_the_runs_that_it_names_however_many_changed_since(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as served:
        old = await served.api.submit(2)
        for _ in range(LISTED + 1):
            await served.passes(0.002)
            await served.api.submit(1)
        name = (old["job_id"], old["latest_run"]["run_id"])
        missing = (old["job_id"], "01ARZ3NDEKTSV4RRFFQ69G5FAV")
        for caller in (served.caller, None):
            reader = served.begin(
                await served.service.progress.watch_all(caller, named=[name, missing])
            )
            await served.passes(1.0)
            assert len(reader.words) > LISTED
            assert reader.snapshots.count(reader.snapshots[0]) == 1
            assert [one.run_id for one in reader.snapshots].count(name[1]) == 1
        [task, _] = await served.api.tasks_of(name[1])
        await served.api.succeed(name[0], name[1], task.task_id)
        await served.passes(1.0)
        assert (reader.snapshots[-1].run_id, reader.stats[-1]) == (name[1], (1, 2))


async def test_a_stream_names_no_run_of_somebody_else(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(1)
        name = (job["job_id"], job["latest_run"]["run_id"])
        reader = served.begin(await served.service.progress.watch_all("bob", named=[name]))
        await served.passes(1.0)
        assert reader.snapshots == []


async def test_strangers_find_nothing_whether_the_run_is_watched_or_not(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(1)
        run_id = job["latest_run"]["run_id"]
        for _ in range(2):
            for caller, job_id in (("stranger", job["job_id"]), (served.caller, run_id)):
                with pytest.raises(ConveyorError, match="not found|no such"):
                    await served.service.progress.watch_run(caller, job_id, run_id)
            assert (await served.watch(job, caller=None)).watcher.caller is None
        assert served.service.progress.streams == 2


async def test_streams_are_bounded_for_all_and_for_each_caller(tmp_path: Path) -> None:
    async with world(tmp_path, max_streams=3, max_caller_streams=2) as served:
        job = await served.api.submit(1)
        ids = job["job_id"], job["latest_run"]["run_id"]
        watch = served.service.progress.watch_run
        first, _second = await watch(served.caller, *ids), await watch(served.caller, *ids)
        with pytest.raises(ConveyorError, match="CONVEYOR_MAX_CALLER_STREAMS") as refused:
            await watch(served.caller, *ids)
        assert refused.value.retry_after
        await watch(None, *ids)
        with pytest.raises(ConveyorError, match="CONVEYOR_MAX_STREAMS"):
            await watch(None, *ids)
        with first:
            pass
        await watch(served.caller, *ids)


async def test_the_end_is_told_and_the_deaf_are_cut_off(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(1)
        ids = job["job_id"], job["latest_run"]["run_id"]
        reader = await served.watch(job)
        deaf = await served.service.progress.watch_run(served.caller, *ids)
        cut: list[bool] = []

        def cut_off() -> None:
            cut.append(True)
            deaf.__exit__(None, None, None)

        deaf.cut = cut_off
        served.group.start_soon(served.service.progress.end)
        await served.until(lambda: bool(cut))
        assert (reader.ended, reader.words[-1]) == (True, StreamWord.BYE)
        assert served.service.progress.streams == 0
        with pytest.raises(ConveyorError, match="stopping"):
            await served.service.progress.watch_run(served.caller, *ids)


async def test_a_store_that_fails_is_told_once_and_read_again(
    tmp_path: Path, unforeseen: list[Any]
) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(2)
        reader = await served.watch(job)
        served.runs.fails = True
        await worked(served, job)
        await served.passes(5.0)
        assert len(reader.snapshots) == 1
        served.runs.fails = False
        await served.until(lambda: reader.ended)
        assert reader.stats[-1] == (2, 2)
    assert len(unforeseen) == 1
    unforeseen.clear()


async def test_what_the_row_does_not_say_is_told_within_a_second(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        reader = await served.watch(await served.api.submit(1))
        await served.until(lambda: bool(reader.words))
        before = served.runs.reads
        served.outages.append(Outage(Shared.GATEWAY, "it is away", 1))
        await served.until(lambda: len(reader.snapshots) == 2)
        assert b"it is away" in reader.snapshots[-1].body
        assert served.runs.reads == before


# -- the runs that changed last --


def ids(snapshots: list[RunSnapshot]) -> list[str]:
    return [snapshot.run_id for snapshot in snapshots]


def run_id_of(job: dict[str, Any]) -> str:
    run_id: str = job["latest_run"]["run_id"]
    return run_id


async def test_a_stream_of_all_runs_tells_the_live_and_the_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        ended, live = await served.api.submit(1), await served.api.submit(2)
        await served.api.drain(ended)
        await served.passes(60.0)
        reader = served.begin(await served.service.progress.watch_all(served.caller))
        await served.until(lambda: len(reader.snapshots) == 2)
        assert {one.run_id: one.ended for one in reader.snapshots} == {
            run_id_of(ended): True,
            run_id_of(live): False,
        }
        later = await served.api.submit(1)
        await worked(served, later)
        await worked(served, live)
        await served.until(lambda: sum(one.ended for one in reader.snapshots) == 3)
        assert not reader.ended
        last = {one.run_id: json.loads(one.body)["stats"] for one in reader.snapshots}
        for job, total in ((live, 2), (later, 1)):
            assert last[run_id_of(job)]["completed"] == total
        numbers = [one.number for one in reader.snapshots]
        assert numbers == sorted(set(numbers))


async def test_a_caller_sees_only_its_own_runs_and_none_sees_all(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        mine = await served.api.submit(1)
        theirs = (
            await served.api.foreign.post("/v1/jobs", json={"tasks": [{"url": "https://a.test/"}]})
        ).json()
        progress = served.service.progress
        own = served.begin(await progress.watch_all(served.caller))
        everybody = served.begin(await progress.watch_all(None))
        nobody = served.begin(await progress.watch_all("stranger"))
        await served.until(lambda: len(everybody.words) == 2)
        await worked(served, theirs)
        await served.until(lambda: everybody.snapshots[-1].ended)
        assert set(ids(own.snapshots)) == {run_id_of(mine)}
        assert set(ids(everybody.snapshots)) == {run_id_of(mine), run_id_of(theirs)}
        assert nobody.words == []


async def test_a_reader_that_comes_back_is_told_what_changed_since(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        progress = served.service.progress
        quiet, busy = await served.api.submit(1), await served.api.submit(2)
        reader = served.begin(await progress.watch_all(served.caller))
        await served.until(lambda: len(reader.words) == 2)
        await served.passes(120.0)
        last = served.clock.now()
        await served.passes(120.0)
        await worked(served, busy)
        made = await served.api.submit(1)
        again = served.begin(await progress.watch_all(served.caller, last=last))
        await served.until(lambda: len(again.words) == 2)
        await served.passes(5.0)
        assert {one.run_id: one.ended for one in again.snapshots} == {
            run_id_of(busy): True,
            run_id_of(made): False,
        }
        assert min(one.number for one in again.snapshots) > last
        assert run_id_of(quiet) not in ids(again.snapshots)


@pytest.mark.slow
async def test_more_runs_than_a_list_holds_are_told_oldest_first(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        before = await served.api.submit(1)
        await served.passes(60.0)
        last = served.clock.now()
        await served.passes(60.0)
        made = []
        for _ in range(2 * LISTED + 50):
            job = await served.api.submit(1)
            served.clock.shift(0.01)
            made.append(run_id_of(job))
        watcher = await served.service.progress.watch_all(served.caller, last=last)
        reader = served.begin(watcher)
        await served.until(lambda: len(reader.words) >= len(made))
        assert set(ids(reader.snapshots)) == set(made)
        older = ids(reader.snapshots)[: LISTED + 50]
        assert older == sorted(older)
        assert run_id_of(before) not in made
        numbers = [one.number for one in reader.snapshots]
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("away", [-3_700_000, 3_700_000])
async def test_too_old_a_number_is_answered_by_a_reset(tmp_path: Path, away: int) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(1)
        watcher = await served.service.progress.watch_all(
            served.caller, last=served.clock.now() + away
        )
        reader = served.begin(watcher)
        await served.until(lambda: len(reader.words) == 2)
        assert reader.words[0] is StreamWord.RESET
        assert ids(reader.snapshots) == [run_id_of(job)]
        assert reader.snapshots[0].number <= served.clock.now()


@pytest.mark.parametrize("polls", [False, True])
async def test_a_stream_of_all_runs_reads_none_when_nobody_is_left(
    tmp_path: Path, polls: bool
) -> None:
    async with world(tmp_path, polls=polls) as served:
        job = await served.api.submit(5)
        with await served.service.progress.watch_all(served.caller):
            pass
        before = served.runs.reads
        await worked(served, job)
        await served.passes(5.0)
        assert served.runs.reads == before


async def test_the_streams_of_a_run_and_of_all_share_its_reads(tmp_path: Path) -> None:
    async with world(tmp_path, polls=True) as served:
        job = await served.api.submit(1)
        progress = served.service.progress
        await served.watch(job)
        for _ in range(5):
            served.begin(await progress.watch_all(served.caller))
        before = served.runs.reads
        await served.passes(10 * POLL)
        assert 9 <= served.runs.reads - before <= 11


async def test_a_deleted_run_is_told_as_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as served:
        job = await served.api.submit(1)
        reader = served.begin(await served.service.progress.watch_all(served.caller))
        await served.until(lambda: len(reader.words) == 1)
        await served.api.client.delete(f"/v1/jobs/{job['job_id']}")
        await served.until(lambda: len(reader.words) == 2)
        assert reader.snapshots[-1].ended
        assert reader.snapshots[-1].status == "deleted"
