"""An unforeseen error on the way of a message from its queue to its call, in virtual time: it costs
no message and no permit, and the worker goes on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from conveyor.domain.hosts import HostRules, host_key
from conveyor.engine.reserve import ReservePolicy
from tests.unit.dispatch_world import Work, World
from tests.unit.test_pipeline import StagedWork

A, B = "a.example:443", "b.example:443"
SLOTS = 10
TASKS = 30
SOON = 8.0
"""Seconds, fewer than a visibility timeout: a message that was forgotten does not come by then."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Unforeseen(Exception):
    """A fault that no caller knows of."""


class Seam:
    """Makes a method of an object raise in its calls from `first` on, `times` times."""

    def __init__(self, owner: Any, name: str, first: int, times: int) -> None:
        self.calls = 0
        self._due = range(first, first + times)
        self._method: Callable[..., Any] = getattr(owner, name)
        self._name = name
        setattr(owner, name, self._async if inspect.iscoroutinefunction(self._method) else self)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._pass()
        return self._method(*given, **named)

    async def _async(self, *given: Any, **named: Any) -> Any:
        self._pass()
        return await self._method(*given, **named)

    def close(self) -> bool:
        """Raise no more; tell whether it has raised."""
        has_raised = self.calls >= self._due.start
        self._due = range(0)
        return has_raised

    def _pass(self) -> None:
        self.calls += 1
        if self.calls in self._due:
            raise Unforeseen(f"{self._name}, call {self.calls}")


Place = Callable[[World], Any]


def the_rules(bench: World) -> Any:
    return bench.policies


def the_planner(bench: World) -> Any:
    return bench.dispatcher._planner


def the_policy(bench: World) -> Any:
    return bench.members[0].policy


def the_paces(bench: World) -> Any:
    assert isinstance(policy := bench.members[0].policy, ReservePolicy)
    return policy.hosts


def the_pacing(bench: World) -> Any:
    return bench.pacing


def the_queues(bench: World) -> Any:
    return bench.queues


def the_ledger(bench: World) -> Any:
    return bench.permits


def the_turns(bench: World) -> Any:
    return bench.members[0].turns


def the_waits(bench: World) -> Any:
    return bench.dispatcher.waits


def the_work(bench: World) -> Any:
    return bench.tasks


def world(*, with_hosts: bool, work: type[Work] = Work) -> World:
    return World(
        slots=SLOTS,
        duration=lambda _delivery: 0.5,
        work=work,
        limits=HostRules(limit=3, rate=10.0) if with_hosts else None,
    )


async def outlives(
    bench: World, place: Place, name: str, first: int, lanes: Sequence[str] = ()
) -> bool:
    """Work a run while a method raises; tell whether it was called often enough to. Neither a
    message is lost then, nor a permit, a place of a slot, or the worker."""
    seam = Seam(place(bench), name, first, times=2)
    told = f"{name} from call {first} on, lanes {lanes}"
    async with bench.running():
        await bench.submit("a", TASKS, hosts=(A, B), lanes=lanes, limit=SLOTS)
        await bench.clock.advance(SOON)
        assert len(set(bench.tasks.done)) == TASKS, told
        assert not bench.dispatcher.has_work, told
        for lane in bench.dispatcher.lanes.of("a"):
            assert (lane.busy - lane.probing, lane.kept, lane.waiting) == (0, 0, 0), told
        assert bench.dispatcher.calling == 0, told
        # All slots, and all permits of a job, are there for another run.
        has_raised = seam.close()
        bench.tasks.peak.clear()
        bench.limits = HostRules()
        await bench.submit("b", SLOTS, hosts=(A, B), limit=SLOTS)
        await bench.clock.advance(SOON)
        assert len(set(bench.tasks.done)) == TASKS + SLOTS, told
        assert bench.tasks.peak["all"] >= SLOTS - 1, told
    assert (bench.granted("a"), bench.granted("b")) == (0, 0), told
    assert [bench.permits.total(host_key(host)) for host in (A, B)] == [0, 0], told
    return has_raised


WITH_HOSTS: list[tuple[Place, str]] = [
    (the_rules, "rules_of"),
    (the_rules, "hold"),
    (the_planner, "plan"),
    (the_planner, "follow"),
    (the_policy, "may_receive"),
    (the_policy, "may_acquire"),
    (the_policy, "acquire"),
    (the_policy, "take"),
    (the_policy, "put_back"),
    (the_policy, "admit"),
    (the_policy, "discharge"),
    (the_policy, "next_due"),
    (the_policy, "tend"),
    (the_policy, "bounce_for"),
    (the_paces, "of"),
    (the_paces, "under"),
    (the_paces, "rematch"),
    (the_pacing, "book"),
    (the_pacing, "state"),
    (the_pacing, "line_up"),
    (the_turns, "turn_of"),
    (the_turns, "may_go_on"),
    (the_turns, "enter"),
    (the_turns, "begin"),
    (the_turns, "end"),
    (the_turns, "tend"),
    (the_waits, "_begin"),
    (the_queues, "receive"),
    (the_ledger, "acquire_or_renew"),
    (the_work, "handle"),
]


IN_STAGES: list[tuple[Place, str]] = [
    (the_planner, "plan"),
    (the_policy, "next_due"),
    (the_policy, "may_buffer"),
    (the_policy, "may_receive"),
    (the_policy, "admit"),
    (the_policy, "tend"),
    (the_queues, "receive"),
    (the_work, "claim"),
    (the_work, "begin"),
    (the_work, "settle"),
    (the_work, "undo"),
]


@pytest.mark.parametrize(("place", "name"), WITH_HOSTS)
@pytest.mark.parametrize("lanes", [(), (A, B)], ids=["shared", "of hosts"])
async def test_an_error_on_the_way_to_a_host_costs_nothing(
    place: Place, name: str, lanes: tuple[str, ...], unforeseen: list[logging.LogRecord]
) -> None:
    for first in (1, 12):
        has_raised = await outlives(world(with_hosts=True), place, name, first, lanes)
        assert bool(unforeseen) == (has_raised and name != "handle"), "each is told of"
        unforeseen.clear()


@pytest.mark.parametrize(("place", "name"), IN_STAGES)
async def test_an_error_on_the_way_to_a_claim_costs_nothing(
    place: Place, name: str, unforeseen: list[logging.LogRecord]
) -> None:
    for first in (1, 12):
        has_raised = await outlives(world(with_hosts=False, work=StagedWork), place, name, first)
        assert bool(unforeseen) == (has_raised and name not in ("begin", "settle"))
        unforeseen.clear()


async def test_a_lane_books_starts_again_after_its_rule_was_away_meanwhile() -> None:
    bench = world(with_hosts=True)
    paces, run = the_paces(bench), await bench.submit("a", 1, hosts=(A,), lanes=(A,))
    (lane,) = (one for one in bench.dispatcher.lanes.of(run.run_id) if one.host)
    assert paces.take(lane, 1) is None
    kept, bench.limits = bench.limits, HostRules()
    await bench.clock.advance(2.0)
    assert paces.rematch() == [lane]
    await paces.fill(lane, 1)
    bench.limits = kept
    await bench.clock.advance(2.0)
    assert paces.rematch() == [lane]
    assert paces.askable(lane, 1, bench.clock.monotonic()) == 1
