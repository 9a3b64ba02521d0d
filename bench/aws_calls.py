"""What does a task cost in calls of AWS, and how much CPU do they take?

One api and one worker over emulators. A large job is submitted paused, so that ingestion comes by
itself; then it is resumed and worked over the in-process fake gateway. Calls are counted by the
seam that each of them goes through, and scraped from the two processes. A last pair of rows writes
the same rows by BatchExecuteStatement, which Conveyor does, and by BatchWriteItem, which would set
back rows that have moved on.

The emulators are slow, and live on the same cores: seconds say nothing here. Calls, capacity units
and the CPU of Conveyor's own processes do.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio

from bench.conveyor_server import API_KEY, tasks_json
from bench.fake_targets import small
from bench.harness import Figure, Options, Row, Scenario, wait_until
from bench.processes import cpu_seconds
from conveyor.clock import SystemClock
from conveyor.domain.ids import task_ids
from conveyor.domain.model import TaskSpec
from conveyor.domain.shards import ONE_SHARD
from conveyor.prod.aws.boto import BotoAws, open_aws
from conveyor.prod.aws.options import AwsOptions
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import Key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.table import PARTITION_KEY, SORT_KEY, description
from conveyor.prod.dynamodb.task_items import new_task_item
from conveyor.prod.dynamodb.task_writes import insert_items
from conveyor.prod.dynamodb.values import tag_all
from conveyor.testing.fleet import Fleet, RoleProcess, Services

MILLION = 1_000_000
DEADLINE = 1_800.0
ROWS = 5_000
_CALL = re.compile(
    r'^conveyor_aws_calls_total\{operation="(\w+)",outcome="\w+",service="(\w+)"\} ([\d.e+]+)$',
    re.MULTILINE,
)
_UNITS = re.compile(
    r'^conveyor_aws_consumed_capacity_total\{operation="(\w+)"\} ([\d.e+]+)$', re.MULTILINE
)


def services() -> Services:
    """The emulators that `scripts/emulators run` has started."""
    names = ("dynamodb", "sqs", "s3", "stepfunctions", "redis")
    return Services(**{name: os.environ[f"CONVEYOR_TEST_{name.upper()}"] for name in names})


class Watched:
    """One process of the fleet: its calls, units and CPU seconds since the last look."""

    def __init__(self, process: RoleProcess) -> None:
        self._process = process
        self._seen: Counter[str] = Counter()
        self._cpu = 0.0

    def look(self) -> tuple[Counter[str], float]:
        """Calls by service and operation, units as "units", and CPU seconds, since the last."""
        with urllib.request.urlopen(f"{self._process.info.metrics}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        now: Counter[str] = Counter()
        for operation, service, count in _CALL.findall(text):
            now[f"{service} {operation}"] += round(float(count))
        now["units"] = round(sum(float(units) for _, units in _UNITS.findall(text)))
        cpu = cpu_seconds([self._process.info.pid])
        since, cpu_since = now - self._seen, cpu - self._cpu
        self._seen, self._cpu = now, cpu
        return since, cpu_since


class Api:
    """A lean client of the fleet."""

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, method: str, path: str, body: bytes | None = None) -> Any:
        """One request below /v1; the decoded answer."""
        headers = {"X-API-Key": API_KEY, "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self._address}{path}", data=body, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def run(self, job_id: str) -> Any:
        """The latest run of a job."""
        return self.call("GET", f"/jobs/{job_id}")["latest_run"]


def phases(options: Options) -> list[Row]:
    """Submit and ingestion, then the work, as rows a task."""
    fleet = Fleet(
        services(),
        gateway="fake",
        directory=options.directory("aws_calls"),
        inherited=os.environ,
        apis=1,
        workers=1,
    )
    with fleet:
        api, tasks = Api(fleet.api), options.tasks
        watched = [Watched(process) for process in fleet.processes]
        for one in watched:
            one.look()
        body = tasks_json(
            [small(number) for number in range(tasks)], **{"async": True, "max_inflight": 1_000}
        )
        job_id: str = api.call("POST", "/jobs", body)["job_id"]
        api.call("POST", f"/jobs/{job_id}/pause")
        wait_until(
            lambda: api.run(job_id).get("ingest_status") == "done", seconds=DEADLINE, pause=0.5
        )
        worked_early = api.run(job_id)["stats"]["completed"]
        ingested = [one.look() for one in watched]
        api.call("POST", f"/jobs/{job_id}/resume")
        wait_until(lambda: api.run(job_id)["status"] == "completed", seconds=DEADLINE, pause=0.5)
        time.sleep(2.0)  # acknowledgements, and the last permits given back
        worked = [one.look() for one in watched]
    return [
        *_rows("submit and ingest", ingested, tasks),
        *_rows("work", worked, tasks - worked_early),
    ]


def _rows(phase: str, looks: Sequence[tuple[Counter[str], float]], tasks: int) -> list[Row]:
    calls: Counter[str] = Counter()
    for counted, _ in looks:
        calls += counted
    units = calls.pop("units", 0)
    cpu = sum(seconds for _, seconds in looks)
    rows = [
        Row(
            f"{phase}: {name}",
            {"a task": round(count / tasks, 3), "of a million": _of(count, tasks)},
        )
        for name, count in calls.most_common()
    ]
    figures: dict[str, Figure] = {
        "a task": round(calls.total() / tasks, 3),
        "of a million": _of(calls.total(), tasks),
        "capacity units a task": round(units / tasks, 2),
        "ms CPU a task": round(1_000 * cpu / tasks, 2),
    }
    return [Row(f"{phase}: all", figures), *rows]


def _of(count: int, tasks: int) -> int:
    return round(count / tasks * MILLION)


def writes(_options: Options) -> list[Row]:
    """The same rows by either operation, into tables of their own: CPU and calls a row."""
    return [anyio.run(_written, name) for name in ("BatchExecuteStatement", "BatchWriteItem")]


async def _written(name: str) -> Row:
    aws = await open_aws(
        AwsOptions(dynamodb_endpoint=services().dynamodb), SystemClock(), "dynamodb"
    )
    table = Table(aws, f"bench-{secrets.token_hex(6)}", SystemClock())
    await aws.call("dynamodb", "create_table", description(table.name))
    place = Place("01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAW", 1, ONE_SHARD)
    items = [
        (place.task(task_id), new_task_item(task_id, TaskSpec(url=small(number)), now=1))
        for number, task_id in enumerate(task_ids(place.run_id, 0, ROWS))
    ]
    before = time.process_time()
    if name == "BatchWriteItem":
        await _put(aws, table, items)
    else:
        assert len(await insert_items(table, items)) == ROWS
    cpu = time.process_time() - before
    calls = sum(count for (_, _, outcome), count in aws.stats.calls.items() if outcome == "ok") - 1
    units = sum(aws.stats.capacity.values())
    await aws.call("dynamodb", "delete_table", {"TableName": table.name})
    await aws.aclose()
    return Row(
        f"writing rows: {name}",
        {
            "a task": round(calls / ROWS, 3),
            "capacity units a task": round(units / ROWS, 2),
            "ms CPU a task": round(1_000 * cpu / ROWS, 3),
        },
    )


async def _put(aws: BotoAws, table: Table, items: Sequence[tuple[Key, Item]]) -> None:
    limiter = anyio.Semaphore(16)

    async def put(some: Sequence[tuple[Key, Item]]) -> None:
        requests = [
            {"PutRequest": {"Item": tag_all({PARTITION_KEY: key.pk, SORT_KEY: key.sk, **item})}}
            for key, item in some
        ]
        async with limiter:
            answer = await aws.call(
                "dynamodb", "batch_write_item", {"RequestItems": {table.name: requests}}
            )
        assert not answer.get("UnprocessedItems")

    async with anyio.create_task_group() as group:
        for start in range(0, len(items), 25):
            group.start_soon(put, items[start : start + 25])


def run(options: Options) -> list[Row]:
    """All of it; `--only phases` or `--only writes` for a part."""
    rows: list[Row] = []
    if options.wants("phases"):
        rows += phases(options)
    if options.wants("writes"):
        rows += writes(options)
    return rows


SCENARIO = Scenario(
    name="aws_calls",
    question="What does a task cost in calls of AWS?",
    run=run,
    tasks=10_000,
    repeats=1,
)
