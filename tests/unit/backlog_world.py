"""A worker of production in virtual time, over queues of SQS that are held in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from conveyor.bootstrap import LoopOptions, Outside, build_worker
from conveyor.dev.permits import MemoryPermits
from conveyor.dev.queues import LocalSignals
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import DispatchableRun
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.worker import Worker
from conveyor.ports.binding import Binding
from conveyor.ports.queues import CONTROL_QUEUE, TaskMessage
from conveyor.ports.tasks import Claim, NotClaimable
from conveyor.prod.aws.calls import Answer, AwsRefused, Parameters
from conveyor.prod.sqs.messages import entry
from conveyor.prod.sqs.queues import SqsQueues
from conveyor.prod.sqs.registry import Generation, prefix, run_queue_name
from conveyor.settings import Settings
from conveyor.testing.clock import FakeClock

ENVIRONMENT = "test"
ASKING = "get_queue_attributes"


class MemorySqs:
    """SQS, as much of it as a worker asks. `waiting` are messages by queue and `hidden` those that
    were received; `calls` counts by operation, `under_way` and `most` those for a depth at a
    time."""

    def __init__(self, clock: FakeClock) -> None:
        self.waiting: dict[str, list[dict[str, Any]]] = {
            f"{prefix(ENVIRONMENT)}{CONTROL_QUEUE}": []
        }
        self.hidden: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.under_way = self.most = 0
        self.answers = True
        self._clock = clock
        self._numbers = 0

    def fill(self, run_id: str, tasks: int) -> None:
        """Put references into a run's queue."""
        found = self.waiting.setdefault(run_queue_name(ENVIRONMENT, run_id, 1), [])
        for number in range(tasks):
            message = TaskMessage(f"job-{run_id}", run_id, f"{run_id}-{number}")
            body = entry(message, delay=0.0, now=0)["MessageBody"]
            self._numbers += 1
            found.append({"Body": body, "MessageId": str(self._numbers)})

    @property
    def depth(self) -> int:
        """All messages of all queues."""
        return sum(map(len, self.waiting.values())) + self.hidden.total()

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """One call, which takes no time but where it waits for messages."""
        self.calls[operation] += 1
        queue = parameters.get("QueueName") or parameters["QueueUrl"]
        if queue not in self.waiting:
            raise AwsRefused("QueueDoesNotExist", "no")
        match operation:
            case "get_queue_url":
                return {"QueueUrl": queue}
            case "get_queue_attributes":
                return await self._count(queue)
            case "receive_message":
                return await self._receive(queue, parameters)
            case "delete_message_batch":
                self.hidden[queue] -= len(parameters["Entries"])
        return {"Successful": [{"Id": one["Id"]} for one in parameters["Entries"]]}

    async def _count(self, queue: str) -> Answer:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self._clock.sleep(0.001)
        finally:
            self.under_way -= 1
        if not self.answers:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "sqs is away")
        counts = {
            "ApproximateNumberOfMessages": str(len(self.waiting[queue])),
            "ApproximateNumberOfMessagesNotVisible": str(self.hidden[queue]),
        }
        return {"Attributes": counts}

    async def _receive(self, queue: str, parameters: Parameters) -> Answer:
        waiting = self.waiting[queue]
        if not waiting:
            await self._clock.sleep(parameters["WaitTimeSeconds"])
        most = parameters["MaxNumberOfMessages"]
        found, waiting[:] = waiting[:most], waiting[most:]
        self.hidden[queue] += len(found)
        attributes = {"ApproximateReceiveCount": "1"}
        return {
            "Messages": [
                {**one, "ReceiptHandle": one["MessageId"], "Attributes": attributes}
                for one in found
            ]
        }

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """None is needed."""
        raise AssertionError("no link is needed")


class FirstGenerations:
    """Every run has its first queue."""

    async def current(self, run_id: str, host: int | None = None) -> Generation:
        """The first."""
        return Generation(1, live=True)

    async def follow(self, run_id: str, known: int, host: int | None = None) -> Generation:
        """No queue is lost."""
        raise AssertionError("no queue is made")


class NoRefill:
    """Tasks that nobody asks for."""

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        """No queue is filled again."""
        raise AssertionError("no queue is filled again")

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """No host is asked for."""
        raise AssertionError("no host is asked for")


class OpenRuns:
    """The runs with work, which are the same from the start."""

    def __init__(self, runs: list[DispatchableRun]) -> None:
        self._runs = {run.run_id: run for run in runs}

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """All of them."""
        return list(self._runs.values())

    async def dispatch_changes(self, *, since: int) -> list[object]:
        """Return no changes."""
        return []

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """One of them."""
        return self._runs.get(run_id)


class SlowClaims:
    """Tasks whose work takes so many seconds, all of them in the claim."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    async def claim_task(self, *_: object, **__: object) -> Claim:
        """The task is done by the end of it."""
        await self._clock.sleep(self._seconds)
        return NotClaimable(None)

    async def release_claim(self, *_: object, **__: object) -> None:
        """Nothing was written."""


class BacklogWorld:
    """Workers of `slots` over so many runs of so many `tasks`, each of which takes `seconds`."""

    def __init__(self, *, runs: int, tasks: int, seconds: float, slots: int) -> None:
        self.clock = FakeClock()
        self.sqs = MemorySqs(self.clock)
        self._slots = slots
        self.runs = [
            DispatchableRun(
                run_id=f"run-{number}",
                job_id=f"job-run-{number}",
                priority=5,
                max_inflight=100,
                created_at=self.clock.now(),
            )
            for number in range(runs)
        ]
        for run in self.runs:
            self.sqs.fill(run.run_id, tasks)
        self._claims = SlowClaims(self.clock, seconds)
        self._permits = MemoryPermits(self.clock)

    def queues(self) -> SqsQueues:
        """The queues as a process has them."""

        return SqsQueues(
            self.sqs, self.clock, FirstGenerations(), NoRefill(), environment=ENVIRONMENT
        )

    def worker(self) -> Worker:
        """Another worker, wired as in production."""
        parts: dict[str, Any] = dict.fromkeys(Binding.__slots__)
        # What is None here is asked by nothing that these workers come to within some minutes.
        binding = Binding(
            **{
                **parts,
                "runs": OpenRuns(self.runs),
                "tasks": self._claims,
                "queues": self.queues(),
                "permits": self._permits,
                "signals": LocalSignals(),
                "root_secret": b"secret" * 8,
                "sealing_secrets": (),
            }
        )
        settings = Settings(
            workers=self._slots, sweep_interval=1e6, outbox_interval=1e6, schedule_interval=1e6
        )
        nothing: Any = None
        return build_worker(
            binding,
            Outside(nothing, nothing, ""),
            settings,
            self.clock,
            telemetry=Telemetry(),
            options=LoopOptions(logs_backlog=True),
        )

    @asynccontextmanager
    async def at_work(self, workers: int = 1) -> AsyncIterator[None]:
        """Run `workers` workers."""
        members = [self.worker() for _ in range(workers)]
        async with anyio.create_task_group() as group:
            for member in members:
                group.start_soon(_run, member)
            yield
            group.cancel_scope.cancel()

    async def meanwhile(self, act: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        """Act while time moves on."""
        async with anyio.create_task_group() as group:
            group.start_soon(act)
            await self.clock.advance(seconds)


async def _run(worker: Worker) -> None:
    await worker.run(grace=0.0)
