"""A sweeper over the development store in virtual time, and what it sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.handlers.sweep import Sweeper, SweepOptions
from conveyor.ports.binding import Binding
from conveyor.ports.inputs import InputType, JobInput
from conveyor.ports.queues import CONTROL_QUEUE, Message
from conveyor.records.blob_keys import input_key
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import Api
from tests.unit.wired_handlers import sweeper

INTERVAL = 60.0
QUIET = 300.0
ROW_DAYS = 30
DELIVERY_DAYS = 20
FIRE_DAYS = 10
DAY = 86_400.0


class Outbox:
    """The queues port, as far as the sweeper knows it. `depths` is what the queues hold."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.references: list[tuple[str, list[int]]] = []
        self.dropped: list[str] = []
        self.depths: dict[str, int] = {}
        self.away = False

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Keep a control message."""
        assert (queue, delay) == (CONTROL_QUEUE, 0.0)
        self.sent.append(message)

    async def send_tasks(
        self,
        _job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        _hosts: Sequence[str] = (),
        _lanes: Sequence[str] = (),
    ) -> None:
        """Keep references."""
        self.references.append((run_id, [index for index, _ in tasks]))

    async def drop_run(self, run_id: str) -> None:
        """Keep whose queue went, unless all are away."""
        self.dropped.append(run_id)
        if self.away:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away")

    async def count(self, queue: str) -> int:
        """Return the scripted count."""
        return self.depths.get(queue, 0)


@dataclasses.dataclass
class Sweep:
    """A sweeper over the API's store, and what it sends. `look` sweeps as one tick does."""

    api: Api
    binding: Binding
    outbox: Outbox
    sweeper: Sweeper

    async def look(self, *, after: float = INTERVAL) -> None:
        await self.api.clock.advance(after)
        await self.sweeper.sweep()


class MovingClock:
    """A clock whose sleeps take no waiting: whoever sleeps moves time on."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    async def sleep(self, seconds: float) -> None:
        """Move time on."""
        await self._clock.advance(seconds)


class ManyBodies:
    """The blobs port, as far as the sweeper knows it: so many bodies a prefix, which go in steps of
    so many seconds each. `steps` holds when full ones began."""

    def __init__(self, clock: FakeClock, *, seconds: float, bodies: dict[str, int]) -> None:
        self.bodies = bodies
        self.steps: list[float] = []
        self._clock = clock
        self._seconds = seconds

    async def delete_prefix(self, prefix: str, *, limit: int) -> int:
        """Remove some."""
        went = min(limit, self.bodies.get(prefix, 0))
        if went:
            self.bodies[prefix] -= went
            self.steps.append(self._clock.monotonic())
            await self._clock.advance(self._seconds)
        return went

    async def list_keys(self, prefix: str, *, after: str, limit: int) -> list[str]:
        """There are no templates."""
        return []

    async def delete(self, key: str) -> None:
        """Remove one."""
        await self._clock.advance(self._seconds)


def sweep_over(api: Api, *, row_days: int = ROW_DAYS, **ports: Any) -> Sweep:
    clock = cast(FakeClock, MovingClock(api.clock))
    outbox = Outbox()
    binding = dataclasses.replace(api.binding, queues=cast(Any, outbox), **ports)
    options = SweepOptions(
        interval=INTERVAL,
        quiet_after=QUIET,
        row_retention_days=row_days,
        delivery_retention_days=DELIVERY_DAYS,
        fire_retention_days=FIRE_DAYS,
    )
    return Sweep(api, binding, outbox, sweeper(binding, clock, options=options))


def run_id_of(job: dict[str, Any]) -> str:
    run_id: str = job["latest_run"]["run_id"]
    return run_id


async def slot_of(api: Api, *, lives: float) -> str:
    """A slot with a file in it, for so many seconds; its id."""
    now = api.clock.now()
    slot = JobInput(
        input_id=api.clock.new_id(),
        caller="caller",
        type=InputType.URLS,
        content_type="text/plain",
        created_at=now,
        upload_until=now,
        expires_at=now + round(lives * 1_000),
    )
    await api.binding.inputs.create_input(slot)
    await api.binding.blobs.put(input_key(slot.input_id), b"https://site.test/")
    return slot.input_id
