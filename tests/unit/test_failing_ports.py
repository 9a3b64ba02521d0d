"""Any error of a port costs a worker only a pause: it goes on, and all work is done in the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from conveyor.dev.queues import LocalSignals
from conveyor.domain.ids import task_id
from conveyor.domain.model import DispatchableRun
from conveyor.engine.discovery import Discovery, DiscoveryOptions
from conveyor.engine.worker import Worker
from conveyor.ports.records import DispatchChange
from tests.unit.dispatch_world import GRACE, World

TASKS = 15
HEARTBEAT = 2.0
VISIBILITY = 6.0
"""So short that a message is renewed before its work is done, at each other beat."""
BROKEN_FOR = 20.0
FAULTS = [
    ("queues", "receive"),
    ("queues", "delete"),
    ("queues", "change_visibility"),
    ("queues", "open_run"),
    ("ledger", "acquire_or_renew"),
    ("tasks", "handle"),
    ("tasks", "renew"),
    ("control", "renew"),
    ("catalogue", "dispatchable_runs"),
    ("catalogue", "dispatch_changes"),
    ("catalogue", "dispatchable_run"),
    ("signals", "wait"),
]
TOLD_AS_HANDLERS_ARE = {("tasks", "handle")}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Catalogue:
    """One run that may have work."""

    def __init__(self, run: DispatchableRun) -> None:
        self._run = run

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        return [self._run]

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        return self._run

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        return [DispatchChange(self._run.run_id, self._run)]


class Bench:
    """A whole worker over ports that can be broken by name."""

    def __init__(self, *, policy: str) -> None:
        self.world = World(
            slots=4,
            duration=lambda _delivery: 5.0,
            permit_policy=policy,
            visibility=VISIBILITY,
        )
        self.run = DispatchableRun(
            run_id="r", job_id="j", priority=5, max_inflight=3, created_at=self.world.clock.now()
        )
        self.world.rows["r"] = [(index, task_id("r", index)) for index in range(TASKS)]
        self.catalogue = Catalogue(self.run)
        self.signals = LocalSignals()
        self.ports: dict[str, Any] = {
            "queues": self.world.queues,
            "ledger": self.world.ledger,
            "tasks": self.world.tasks,
            "control": self.world.control,
            "catalogue": self.catalogue,
            "signals": self.signals,
        }

    def worker(self) -> Worker:
        """The worker, with its discovery."""
        discovery = Discovery(
            self.world.dispatcher,
            self.catalogue,
            self.world.queues,
            self.signals,
            self.world.clock,
            DiscoveryOptions(interval=3.0, resync=10.0, evict_after=600.0),
        )
        return Worker(self.world.dispatcher, discovery, self.world.clock, heartbeat=HEARTBEAT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("port", "method", "policy"),
    [*((*fault, "reserve") for fault in FAULTS), ("ledger", "acquire_or_renew", "off")],
)
async def test_what_no_port_may_raise_costs_a_pause_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
    unforeseen: list[logging.LogRecord],
    caplog: pytest.LogCaptureFixture,
    port: str,
    method: str,
    policy: str,
) -> None:
    bench = Bench(policy=policy)
    world, worker = bench.world, bench.worker()
    whole: Callable[..., Any] = getattr(bench.ports[port], method)
    calls = 0

    async def broken(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if world.clock.monotonic() < began + 8.0:
            return await whole(*args, **named)
        raise KeyError("run_id")

    async def hint() -> None:
        while True:
            await world.clock.sleep(2.0)
            bench.signals.run_changed("r")

    await world.queues.send_tasks("j", "r", world.rows["r"])
    began = world.clock.monotonic()
    monkeypatch.setattr(bench.ports[port], method, broken)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: worker.run(grace=GRACE))
        group.start_soon(hint)
        await world.clock.advance(8.0 + BROKEN_FOR)
        asked_while_broken = calls
        monkeypatch.setattr(bench.ports[port], method, whole)
        wanted = {task for _, task in world.rows["r"]}
        for _ in range(20):
            if set(world.tasks.done) == wanted:
                break
            # A message that comes without a permit is hidden for five minutes in the end.
            await world.clock.advance(200.0)
        assert set(world.tasks.done) == wanted
        worker.stop()
        await world.clock.advance(GRACE + 2.0)
        group.cancel_scope.cancel()
    assert 0 < asked_while_broken < 50 * (8.0 + BROKEN_FOR)
    told = [record for record in caplog.records if "KeyError('run_id')" in record.getMessage()]
    assert told
    assert all(record.exc_info for record in told)
    assert bool(unforeseen) is ((port, method) not in TOLD_AS_HANDLERS_ARE)
    unforeseen.clear()


async def renewals_while_one_hangs(
    monkeypatch: pytest.MonkeyPatch, hung: str, *others: str
) -> dict[str, int]:
    """Count the starts of the other renewals while one of them gets no answer."""
    bench = Bench(policy="reserve")
    world, worker = bench.world, bench.worker()
    world.tasks.duration = lambda _delivery: 1_000.0
    methods = {"queues": "change_visibility", "tasks": "renew", "control": "renew"}
    calls = dict.fromkeys((hung, *others), 0)
    answers = anyio.Event()

    def watch(port: str) -> None:
        whole: Callable[..., Any] = getattr(bench.ports[port], methods[port])

        async def watched(*args: Any, **named: Any) -> Any:
            calls[port] += 1
            if port == hung:
                await answers.wait()
            return await whole(*args, **named)

        monkeypatch.setattr(bench.ports[port], methods[port], watched)

    await world.queues.send_tasks("j", "r", world.rows["r"][:2])
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: worker.run(grace=GRACE))
        await world.clock.advance(5.0)
        for port in calls:
            watch(port)
        await world.clock.advance(10 * HEARTBEAT)
        seen = dict(calls)
        answers.set()
        worker.stop()
        await world.clock.advance(GRACE + 2.0)
    world.dispatcher.renew()  # a beat that comes after the end finds nothing to do
    return seen


@pytest.mark.parametrize("hung", ["queues", "tasks", "control"])
async def test_a_renewal_that_hangs_holds_up_no_other_for_any_number_of_beats(
    monkeypatch: pytest.MonkeyPatch, hung: str
) -> None:
    others = {"queues", "tasks", "control"} - {hung}
    calls = await renewals_while_one_hangs(monkeypatch, hung, *others)
    assert calls[hung] == 1
    assert all(calls[port] >= (4 if port == "queues" else 9) for port in others), calls
