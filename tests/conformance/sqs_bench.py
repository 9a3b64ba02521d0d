"""The queues of production over an emulator of SQS, whose clock a test moves along with its own."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import anyio.to_thread
import boto3
import httpx
from botocore.config import Config

from conveyor.clock import SystemClock
from conveyor.ports.clock import Clock
from conveyor.ports.queues import run_queue
from conveyor.prod.admin.resources import QueuesResource
from conveyor.prod.aws.calls import Answer, Aws, AwsOptions, AwsRefused, Parameters
from conveyor.prod.aws.opening import over_clients
from conveyor.prod.sqs.queues import LONG_POLLS, SqsQueues
from conveyor.prod.sqs.registry import Generation, prefix
from conveyor.testing.clock import FakeClock
from tests.conformance.emulators import REGION, address, aws_options, on_aws, unavailable
from tests.conformance.production_store import account
from tests.conformance.queue_rows import Rows
from tests.patient import SECONDS

BLOCKED_SECONDS = 60


class MemoryGenerations:
    """Generations of queues in this process, and those of hosts by run. `ended` are runs that are
    not live."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.hosts: dict[str, dict[int, int]] = {}
        self.ended: set[str] = set()

    async def current(self, run_id: str, host: int | None = None) -> Generation:
        """The present one."""
        hosts = self.hosts.get(run_id, {})
        number = self.numbers.get(run_id, 0) if host is None else hosts.get(host, 0)
        return Generation(number, live=run_id not in self.ended, hosts=dict(hosts))

    async def follow(self, run_id: str, known: int, host: int | None = None) -> Generation:
        """The next one, unless another was quicker."""
        present = await self.current(run_id, host)
        if present.number != known or not present.live:
            return present
        if host is None:
            self.numbers[run_id] = known + 1
        else:
            self.hosts.setdefault(run_id, {})[host] = known + 1
        return (await self.current(run_id, host))._replace(moved=True)


class JumpingClock(FakeClock):
    """Sleeps end at once, and move time on."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """Time moves on by `seconds`."""
        self.slept.append(seconds)
        await self.advance(seconds)


class BlockedNames:
    """A transport that refuses the name of a queue deleted within the last minute, as SQS does: the
    emulator gives it away at once."""

    def __init__(self, aws: Aws, clock: Clock) -> None:
        self._aws = aws
        self._clock = clock
        self._deleted: dict[str, float] = {}

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make the call, unless the name is blocked."""
        now = self._clock.monotonic()
        if operation == "create_queue":
            deleted_at = self._deleted.get(parameters["QueueName"])
            if deleted_at is not None and now - deleted_at < BLOCKED_SECONDS:
                raise AwsRefused("AWS.SimpleQueueService.QueueDeletedRecently", "wait a minute")
        answer = await self._aws.call(service, operation, parameters)
        if operation == "delete_queue":
            self._deleted[parameters["QueueUrl"].rpartition("/")[2]] = now
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Pass the call on."""
        return self._aws.presign(operation, parameters, seconds=seconds)


class SqsBench:
    """Queues of an environment of their own. Time is virtual, in the emulator too."""

    def __init__(self, aws: Aws, url: str, *, max_receives: int) -> None:
        self.rows = Rows()
        self.environment = f"test-{secrets.token_hex(6)}"
        self.generations = MemoryGenerations()
        self.clock = FakeClock()
        self.aws = BlockedNames(aws, self.clock)
        self._url = url
        self.queues = self.process(max_receives=max_receives)

    def process(
        self,
        *,
        aws: Aws | None = None,
        clock: Clock | None = None,
        max_receives: int = 1_000,
        long_polls: int = LONG_POLLS,
    ) -> SqsQueues:
        """The queues as another process has them."""
        return SqsQueues(
            aws or self.aws,
            clock or self.clock,
            self.generations,
            self.rows,
            environment=self.environment,
            max_receives=max_receives,
            long_polls=long_polls,
        )

    @property
    def pending(self) -> int:
        """Return the number of sleeps that wait for time to move."""
        return self.clock.pending

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self.clock.monotonic()

    async def advance(self, seconds: float) -> None:
        """Move time on, here and in the emulator."""
        async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
            answer = await client.post(f"{self._url}/_clock/advance/{seconds * 1_000:g}")
            answer.raise_for_status()
        await self.clock.advance(seconds)

    async def url(self, queue: str) -> dict[str, str]:
        """The URL of a queue by its name within the environment, as a parameter."""
        name = f"{prefix(self.environment)}{queue}"
        answer = await self.aws.call("sqs", "get_queue_url", {"QueueName": name})
        return {"QueueUrl": answer["QueueUrl"]}

    async def queues_of(self, run_id: str) -> list[str]:
        """The names of a run's queues within the environment, in order."""
        own = prefix(self.environment)
        wanted = {"QueueNamePrefix": f"{own}{run_queue(run_id)}-"}
        answer = await self.aws.call("sqs", "list_queues", wanted)
        found = [url.rpartition("/")[2].removeprefix(own) for url in answer.get("QueueUrls", [])]
        return sorted(found)

    async def lose(self, run_id: str, generation: int = 1) -> None:
        """Delete a run's queue behind everybody's back, some time after it was made."""
        await self.advance(BLOCKED_SECONDS)
        where = await self.url(f"{run_queue(run_id)}-{generation}")
        await self.aws.call("sqs", "delete_queue", where)


@cache
def _client() -> tuple[Any, AwsOptions]:
    """A client, made once, and where it asks."""
    endpoint = address("CONVEYOR_TEST_SQS")
    options = aws_options(sqs_endpoint=endpoint)
    client = boto3.session.Session(region_name=REGION).client(
        "sqs",
        endpoint_url=endpoint,
        config=Config(
            retries={"total_max_attempts": 1}, max_pool_connections=options.receive_threads
        ),
    )
    atexit.register(client.close)
    return client, options


@asynccontextmanager
async def sqs_bench(*, max_receives: int = 1_000) -> AsyncIterator[SqsBench]:
    """An environment with its two queues, left to end with the emulator."""
    if on_aws():
        unavailable("the clock of real SQS cannot be moved")
    client, options = await anyio.to_thread.run_sync(_client)
    # Belongs to the running loop, unlike the client, which takes a while to make.
    aws = over_clients({"sqs": client}, options, SystemClock(), credentials=account())
    bench = SqsBench(aws, options.sqs_endpoint, max_receives=max_receives)
    resource = QueuesResource(
        aws, SystemClock(), environment=bench.environment, max_receives=max_receives
    )
    await resource.ensure()
    yield bench
    await aws.aclose()
