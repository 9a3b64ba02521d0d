"""The hosts of a run that have a queue of their own, and the hosts of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

from conveyor.domain import ids
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import Ingest, IngestStatus, RunFailure, RunStatus, TaskSpec
from conveyor.ports.binding import Jobs, Runs
from conveyor.ports.maintenance import QuietRun
from conveyor.ports.queues import MOST_HOST_QUEUES
from conveyor.ports.records import DispatchChange, StoredResponse
from tests.conformance.world import CALLER, World

A, B, C = "a.example:443", "b.example:80", "[::1]:8080"
MANNERS = Politeness(per_host=2, robots=True)


async def submit(world: World, urls: Sequence[str], **fields: Any) -> str:
    """Write a run of these tasks; its id."""
    job, run, tasks = world.draft(len(urls), **fields)
    tasks = [
        msgspec.structs.replace(task, spec=TaskSpec(url=url))
        for task, url in zip(tasks, urls, strict=True)
    ]
    await world.store.jobs.create_job(job, run, tasks, answer=StoredResponse(201, b"{}"), once=None)
    return run.run_id


async def discovered(world: World, run_id: str, *, since: int = 0) -> list[tuple[str, ...]]:
    """The hosts of a run, by each way in which a worker finds it."""
    runs = world.store.runs
    changes = await runs.dispatch_changes(since=since)
    found = [
        *await runs.dispatchable_runs(),
        *(change.run for change in changes),
        await runs.dispatchable_run(run_id),
    ]
    return [run.hosts for run in found if run is not None and run.run_id == run_id]


async def test_a_run_has_no_hosts_until_some_are_added(world: World, runs: Runs) -> None:
    _, run_id = await world.submit(1)
    assert await discovered(world, run_id) == [()] * 3
    assert await runs.add_hosts(run_id, [A, B], now=world.now) == (A, B)
    assert await discovered(world, run_id) == [(A, B)] * 3


async def test_hosts_are_appended_once_and_keep_their_numbers(world: World, runs: Runs) -> None:
    _, run_id = await world.submit(1)
    assert await runs.add_hosts(run_id, [B, A, B], now=world.now) == (B, A)
    assert await runs.add_hosts(run_id, [A, C], now=world.now) == (B, A, C)
    assert await runs.add_hosts(run_id, [A], now=world.now) == (B, A, C)
    assert await runs.add_hosts(run_id, [], now=world.now) == (B, A, C)


async def test_a_run_has_no_more_of_them_than_queues(world: World, runs: Runs) -> None:
    _, run_id = await world.submit(1)
    many = [f"h{number}.example:443" for number in range(2 * MOST_HOST_QUEUES)]
    await runs.add_hosts(run_id, many[:50], now=world.now)
    assert await runs.add_hosts(run_id, many[40:], now=world.now) == tuple(many[:MOST_HOST_QUEUES])
    assert await runs.add_hosts(run_id, [A], now=world.now) == tuple(many[:MOST_HOST_QUEUES])


async def test_discovery_sees_each_addition_as_a_change(world: World, runs: Runs) -> None:
    _, run_id = await world.submit(1)
    for hosts in ((A,), (A, B)):
        await world.clock.advance(100)
        now = world.now
        assert await runs.dispatch_changes(since=now) == []
        await runs.add_hosts(run_id, hosts[-1:], now=now)
        assert await discovered(world, run_id, since=now) == [hosts] * 3
        await world.clock.advance(100)
        before = world.now
        await runs.add_hosts(run_id, hosts, now=before)  # nothing new
        assert await runs.dispatch_changes(since=before) == []


async def test_those_who_add_at_once_agree_on_the_numbers(world: World, runs: Runs) -> None:
    _, run_id = await world.submit(1)
    found: list[tuple[str, ...]] = []

    async def add(number: int) -> None:
        hosts = [f"h{number}.example:443", A]
        found.append(await runs.add_hosts(run_id, hosts, now=world.now))

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(add, number)
    [last] = set(await discovered(world, run_id))
    assert len(last) == len(set(last)) == 6
    assert all(hosts == last[: len(hosts)] for hosts in found)


async def test_hosts_stay_through_pause_and_end_and_an_ended_run_gets_no_more(
    world: World, runs: Runs
) -> None:
    job_id, run_id = await world.submit(1, politeness=MANNERS)
    await runs.add_hosts(run_id, [A], now=world.now)
    await runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    assert await runs.add_hosts(run_id, [B], now=world.now) == (A, B)
    assert await discovered(world, run_id) == []
    await runs.pause_run(CALLER, job_id, paused=False, now=world.now)
    assert await discovered(world, run_id) == [(A, B)] * 3
    await runs.fail_run(run_id, reason=RunFailure.INGEST_FAILED, detail="it is over", now=world.now)
    before = await world.run(job_id)
    assert await runs.add_hosts(run_id, [C], now=world.now) == (A, B)
    assert await world.run(job_id) == before
    assert DispatchChange(run_id, None) in await runs.dispatch_changes(since=0)


async def test_adding_hosts_leaves_all_else_of_a_run_as_it_is(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(2)
    await world.succeed(run_id, 0)
    before = await world.run(job_id)
    await runs.add_hosts(run_id, [A], now=world.now)
    after = await world.run(job_id)
    assert after == msgspec.structs.replace(before, version=after.version)
    await world.succeed(run_id, 1)
    assert (await world.run(job_id)).status is RunStatus.COMPLETED


async def test_a_run_that_is_gone_has_no_hosts(world: World, runs: Runs) -> None:
    assert await runs.add_hosts(world.clock.new_id(), [A], now=world.now) == ()


@pytest.mark.parametrize("shards", [1, 3])
async def test_the_hosts_of_tasks_come_in_the_order_asked(world: World, shards: int) -> None:
    urls = [
        "https://A.example/x?é",
        "http://b.example",
        "http://[::1]:8080/",
        "https://a.example./",
    ]
    run_id = await submit(world, urls, task_shard_count=shards)
    references = [(index, ids.task_id(run_id, index)) for index in (3, 1, 0, 2, 1)]
    assert await world.store.tasks.task_hosts(run_id, references) == [A, B, A, C, B]
    assert await world.store.tasks.task_hosts(run_id, []) == []


async def test_a_row_that_is_gone_has_no_host(world: World) -> None:
    run_id = await submit(world, ["https://a.example/"])
    references = [(1, ids.task_id(run_id, 1)), (0, ids.task_id(run_id, 0))]
    assert await world.store.tasks.task_hosts(run_id, references) == ["", A]
    other = world.clock.new_id()
    assert await world.store.tasks.task_hosts(other, references) == ["", ""]


async def test_the_hosts_of_many_tasks_are_read_at_once(world: World) -> None:
    urls = [f"https://h{index % 7}.example/{index}" for index in range(250)]
    run_id = await submit(world, urls)
    references = await world.store.tasks.unfinished_after(run_id, -1, 1_000)
    hosts = await world.store.tasks.task_hosts(run_id, references)
    assert hosts == [f"h{index % 7}.example:443" for index in range(250)]


async def test_the_sweeper_learns_how_the_references_of_a_quiet_run_are_sent(
    world: World, runs: Runs
) -> None:
    job_id, run_id = await world.submit(1, politeness=MANNERS)
    await runs.add_hosts(run_id, [A], now=world.now)
    updated_at = (await world.run(job_id)).updated_at
    [quiet] = await world.store.sweeping.quiet_runs(before=world.now + 1)
    assert quiet == QuietRun(job_id, run_id, updated_at, MANNERS, (A,))


async def test_an_ingester_learns_the_politeness_of_its_run(world: World, jobs: Jobs) -> None:
    for manners in (MANNERS, None):
        job, run, _ = world.draft(5, politeness=manners)
        ingest = Ingest(status=IngestStatus.PENDING, end=5, chunks=(0,))
        run = msgspec.structs.replace(run, ingest=ingest)
        await jobs.create_job(job, run, [], answer=StoredResponse(202, b"{}"), once=None)
        state = await world.store.ingestion.ingesting(run.run_id)
        assert state is not None
        assert state.politeness == manners
