"""The contract of signals in bindings that have them."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from conveyor.dev.queues import LocalSignals
from conveyor.ports.queues import Signals
from conveyor.prod.signals import EndSignals

BINDINGS: dict[str, Callable[[], Signals]] = {"local": LocalSignals}


@pytest.fixture(params=BINDINGS)
def signals(request: pytest.FixtureRequest) -> Signals:
    return BINDINGS[request.param]()


async def test_hints_are_gathered_until_somebody_waits(signals: Signals) -> None:
    for run_id in ("a", "b", "a"):
        signals.run_changed(run_id)
    assert await signals.wait() == {"a", "b"}


async def test_a_hint_wakes_the_waiter_and_is_told_once(signals: Signals) -> None:
    told: list[set[str]] = []

    async def listen() -> None:
        while True:
            told.append(await signals.wait())

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        assert told == []
        for run_id in ("a", "b"):
            signals.run_changed(run_id)
            await anyio.wait_all_tasks_blocked()
        assert told == [{"a"}, {"b"}]
        group.cancel_scope.cancel()


async def test_a_cancelled_wait_loses_no_hint(signals: Signals) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await signals.wait()
    signals.run_changed("a")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await signals.wait()
    signals.run_changed("b")
    assert await signals.wait() == {"a", "b"}


def test_a_halt_is_heard_before_it_returns(signals: Signals) -> None:
    given_up: list[tuple[str, str]] = []
    signals.on_halt(lambda run_id: given_up.append(("first", run_id)))
    signals.on_halt(lambda run_id: given_up.append(("second", run_id)))
    signals.run_halted("a")
    assert given_up == [("first", "a"), ("second", "a")]


async def test_a_halt_is_no_hint_of_its_own(signals: Signals) -> None:
    signals.run_halted("a")
    signals.run_changed("b")
    assert await signals.wait() == {"b"}


async def test_an_end_is_a_hint_as_well(signals: Signals) -> None:
    signals.run_changed("a")
    signals.run_ended("b")
    assert await signals.wait() == {"a", "b"}


@pytest.mark.parametrize("kind", [LocalSignals, EndSignals])
def test_whoever_asked_is_told_of_each_end_and_of_nothing_else(kind: type[Signals]) -> None:
    signals, told = kind(), list[str]()
    signals.on_end(lambda: told.append("first"))
    signals.on_end(lambda: told.append("second"))
    signals.run_changed("a")
    assert told == []
    signals.run_ended("b")
    assert told == ["first", "second"]
