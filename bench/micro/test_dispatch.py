"""Checks the permit policies in virtual time. The timer measures the simulator; only the simulated
figures in `extra_info` are asserted on.

Small by default; `-m "full or not full"` adds the sizes that bench/README.md shows.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.dispatch_grid import (
    FLEET_TASKS,
    FLEET_WORKERS,
    LEDGER,
    PUBLISHED_STORE,
    RECEIVING,
    RESERVING,
    SMALL_CAP_WINDOW,
    SOUND_STORE,
    Cell,
    head_to_head,
)
from conveyor.simulation import Report, simulate

SEEDS = 5
BUFFER = 12
"""Maximum messages that a worker holds beyond its permits."""


def run(benchmark: BenchmarkFixture, cell: Cell) -> Report:
    """Simulate once, timed; put the figures where pytest-benchmark keeps them."""
    report: Report = benchmark.pedantic(  # type: ignore[no-untyped-call]  # it has no types here
        simulate, args=(cell.scenario(),), rounds=1
    )
    benchmark.extra_info.update(report.row())
    assert report.dead_lettered == 0
    return report


def fleet_cell(policy: str, *, workers: int, cap: int, tasks: int, window: float | None) -> Cell:
    """Make a cell of the realistic world."""
    return Cell(
        world="realistic",
        policy=policy,
        permit_store=LEDGER if policy in RESERVING else PUBLISHED_STORE,
        workers=workers,
        cap=cap,
        tasks=tasks,
        seed=0,
        window=window,
    )


def assert_nothing_in_vain(report: Report, cell: Cell) -> None:
    """Check that each message received was worked or is still in hand, and that the cap was
    kept."""
    buffered = 0 if cell.policy == "reserve-strict" else BUFFER * cell.workers
    in_hand = report.receives - report.completed
    assert 0 <= in_hand <= (0 if cell.window is None else cell.cap + buffered)
    assert report.bounces == 0
    assert report.peak_in_flight <= cell.cap
    assert report.seconds_over_cap == 0
    assert report.peak_received <= cell.cap + buffered


@pytest.mark.parametrize(
    "cell",
    head_to_head(SEEDS),
    ids=lambda cell: f"{cell.policy}-{cell.permit_store}-{cell.seed}",
)
def test_published_comparison(benchmark: BenchmarkFixture, cell: Cell) -> None:
    report = run(benchmark, cell)

    assert report.completed == cell.tasks
    if cell.policy in RESERVING:
        assert_nothing_in_vain(report, cell)
    elif cell.permit_store == SOUND_STORE:
        assert report.peak_in_flight <= cell.cap
    elif cell.policy == "off":
        assert 4.0 <= report.amplification <= 5.5
    elif cell.policy == "local":
        assert 1.5 <= report.amplification <= 1.8


@pytest.mark.parametrize("workers", FLEET_WORKERS)
@pytest.mark.parametrize("policy", RESERVING)
@pytest.mark.parametrize(
    ("cap", "tasks", "window"),
    [
        (5, 2_000, 120.0),
        (100, 2_000, None),
        pytest.param(5, FLEET_TASKS, SMALL_CAP_WINDOW, marks=pytest.mark.full),
    ],
)
def test_permits_first(
    benchmark: BenchmarkFixture,
    *,
    policy: str,
    workers: int,
    cap: int,
    tasks: int,
    window: float | None,
) -> None:
    cell = fleet_cell(policy, workers=workers, cap=cap, tasks=tasks, window=window)
    report = run(benchmark, cell)

    assert_nothing_in_vain(report, cell)
    assert report.completed == tasks or window is not None


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", FLEET_WORKERS)
@pytest.mark.parametrize("policy", RESERVING)
def test_permits_first_at_full_size(
    benchmark: BenchmarkFixture, *, policy: str, workers: int
) -> None:
    cell = fleet_cell(policy, workers=workers, cap=100, tasks=FLEET_TASKS, window=None)
    report = run(benchmark, cell)

    assert_nothing_in_vain(report, cell)
    assert report.completed == cell.tasks
    if policy == "reserve" and workers > 1:
        assert report.receive_calls_per_task <= 0.13
        assert report.permit_calls_per_task <= 0.1
        assert report.utilisation_steady >= 0.99


@pytest.mark.parametrize(
    ("tasks", "window"), [(2_000, 1.0), pytest.param(FLEET_TASKS, 5.0, marks=pytest.mark.full)]
)
def test_the_local_gate_does_nothing_below_the_cap(
    benchmark: BenchmarkFixture, *, tasks: int, window: float
) -> None:
    """Ten workers of 50 slots at a cap of 100: event for event the same as no gate at all."""
    cells = {
        policy: fleet_cell(policy, workers=10, cap=100, tasks=tasks, window=window)
        for policy in RECEIVING
    }
    local = run(benchmark, cells["local"])
    off = simulate(cells["off"].scenario())

    assert local.trace_hash == off.trace_hash
    assert local.amplification > 5


def test_same_seed_same_events(benchmark: BenchmarkFixture) -> None:
    cell = fleet_cell("reserve", workers=4, cap=100, tasks=500, window=None)
    first = run(benchmark, cell)

    assert simulate(cell.scenario()).trace_hash == first.trace_hash
