"""Samples the stack of a worker and groups its CPU by use.

One worker, and a job of its own: first its rows are written, then a part of it is worked, sampled
apart. A sample within a call of AWS belongs to that operation and to the part of the client that
was running; any other one to the innermost code that has a name here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.aws_fleet import watched
from bench.aws_job import LIMITS, LargeJob
from bench.cpu_samples import (
    Cost,
    Frame,
    by_name,
    cost_of,
    log_of,
    read_samples,
    sampled,
    seconds_sampled,
)
from bench.harness import ROOT, Figure, Options, Row

SIZE = 10_000
LEAST = 0.01
"""Costs below this part of all are summed up as one."""
SERVICES = ("dynamodb", "sqs", "s3")
CALLING = "hooks, endpoints, requests"
HANDED = "calls handed to threads and back"
LOOP = "event loop"

_CLIENT = (
    Cost("/botocore/auth.py", "signing"),
    Cost("/botocore/serialize.py", "serialising"),
    Cost("/botocore/parsers.py", "parsing"),
    Cost("/urllib3/", "HTTP"),
    Cost("/http/client.py", "HTTP"),
    Cost("/botocore/httpsession.py", "HTTP"),
    Cost("/botocore/awsrequest.py", "HTTP"),
    Cost("/botocore/", CALLING),
)
"""Within the client of AWS. Its connections are urllib3's, over http.client."""
_OWN = f"{ROOT}/conveyor"
_OUTSIDE = (
    Cost("/queue.py Queue", HANDED),
    Cost("/anyio/_backends/_asyncio.py WorkerThread", HANDED),
    Cost("/anyio/_backends/_asyncio.py AsyncIOBackend.run_sync_in_worker_thread", HANDED),
    Cost("/anyio/_backends/_asyncio.py CapacityLimiter", HANDED),
    Cost("/anyio/to_thread.py", HANDED),
    Cost("/site-packages/redis/", "permits and templates in Redis"),
    Cost(f"{_OWN}/prod/redis/", "permits and templates in Redis"),
    Cost(f"{_OWN}/prod/dynamodb/values.py", "store: attribute values"),
    Cost(f"{_OWN}/prod/dynamodb/", "store"),
    Cost(f"{_OWN}/prod/sqs/", "queues"),
    Cost(f"{_OWN}/prod/s3/", "blobs"),
    Cost(f"{_OWN}/prod/aws/signer.py", "AWS: signing"),
    Cost(f"{_OWN}/prod/aws/requests.py", "AWS: writing and reading"),
    Cost(f"{_OWN}/prod/aws/http.py", "AWS: carrier"),
    Cost(f"{_OWN}/prod/aws/", "AWS: seam"),
    Cost(f"{_OWN}/wire/", "HTTP client of AWS and the gateway"),
    Cost(f"{_OWN}/gateway/", "gateway client"),
    Cost(f"{_OWN}/engine/", "engine"),
    Cost(f"{_OWN}/handlers/", "handlers"),
    Cost(f"{_OWN}/roles/", LOOP),
    Cost(f"{_OWN}/", "the rest of Conveyor"),
    Cost(f"{ROOT}/bench/", "the counting of this benchmark"),
)


def name_of(stack: Sequence[Frame]) -> str:
    """Return the name of a sample's cost."""
    for file, function in stack:
        service = file.strip("<>")
        if service in SERVICES:
            return f"{service} {function}: {cost_of(stack, _CLIENT, other=CALLING)}"
    return cost_of(stack, _OUTSIDE, other=LOOP)


def measure(options: Options) -> list[Row]:
    """Measure the greatest costs of writing a row and of working a task, and their sums."""
    directory = options.directory("profile")
    with watched(directory, workers=1, settings=LIMITS) as fleet:
        pid = fleet.workers[0].info.pid
        paths = [directory / f"{name}.txt" for name in ("ingest", "work")]
        with sampled(pid, paths[0]):
            job = LargeJob(fleet, directory, min(SIZE, options.tasks))
        job.work(options.worked // 4)  # templates and connections are made by then
        with sampled(pid, paths[1]):
            done = job.work(options.worked)
    return [
        *costs("ingest", paths[0], cpu=job.ingest.cpu, tasks=job.size),
        *costs("work", paths[1], cpu=done.used.cpu, tasks=done.tasks),
    ]


def costs(phase: str, path: Path, *, cpu: float, tasks: int) -> list[Row]:
    """Build a table of the interpreter's time, and of the CPU used beside it by system calls and
    hashes. `cpu` is in seconds, for all `tasks`."""

    def row(what: str, seconds: float) -> Row:
        figures: dict[str, Figure] = {
            "ms a task": round(1_000 * seconds / tasks, 3),
            "% of the CPU": round(100 * seconds / cpu, 1),
        }
        return Row(f"{phase}, worker: {what}", figures)

    # A thread that waits for a CPU keeps the interpreter: on a busy machine that adds up to more.
    inside = min(cpu, seconds_sampled(log_of(path).read_text()))
    named = [(name_of(one.stack), one.times) for one in read_samples(path.read_text())]
    whole = sum(count for _, count in named)
    found = [(name, inside * count / whole) for name, count in by_name(named)]
    great = [(name, seconds) for name, seconds in found if seconds >= LEAST * cpu]
    return [
        row("all of the CPU", cpu),
        *[row(name, seconds) for name, seconds in great],
        row("lesser ones together", inside - sum(seconds for _, seconds in great)),
        row("outside the interpreter", cpu - inside),
    ]
