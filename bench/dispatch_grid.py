"""The simulations of the dispatch benchmark, and running them on every CPU.

Within a world only the policy and its permit store differ; every cell does the same work as any
other of its world, size and seed.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from bench.harness import cpus
from conveyor.simulation import WORLDS, JobPlan, Scenario, simulate
from conveyor.simulation.view import Row

RESERVING = ("reserve-strict", "reserve")
RECEIVING = ("off", "local", "local-exact")
POLICIES = (*RECEIVING, *RESERVING)
PUBLISHED_STORE = "count-then-insert"
SOUND_STORE = "atomic-rows"
LEDGER = "ledger"

PUBLISHED_TASKS = 500
PUBLISHED_CAP = 5
FLEET_TASKS = 20_000
FLEET_CAPS = (5, 100)
FLEET_WORKERS = (1, 4, 10)
SMALL_CAP_WINDOW = 1_200.0
"""Virtual seconds of a job whose cap of 5 would take it 9,600."""
WINDOWS = {
    "realistic": {1: 20.0, 4: 5.0, 10: 5.0},
    "realistic-cool": {1: 120.0, 4: 60.0, 10: 30.0},
}
"""Virtual seconds by world and workers for policies that receive messages before permits; kept
short, since every idle slot costs tens of messages a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One simulation. `window` is in virtual seconds, None to run to its end."""

    world: str
    policy: str
    permit_store: str
    workers: int
    cap: int
    tasks: int
    seed: int
    window: float | None = None

    def scenario(self) -> Scenario:
        """Make the scenario for the simulator."""
        return Scenario(
            world=WORLDS[self.world],
            policy=self.policy,
            jobs=(JobPlan(tasks=self.tasks, cap=self.cap),),
            workers=self.workers,
            permit_store=self.permit_store,
            window=self.window,
            seed=self.seed,
        )


def head_to_head(seeds: int, *, tasks: int = PUBLISHED_TASKS) -> list[Cell]:
    """Make the published comparison: one worker, cap 5; as published, and with a store that keeps
    the cap."""
    pairs = [(policy, store) for store in (PUBLISHED_STORE, SOUND_STORE) for policy in RECEIVING]
    pairs += [(policy, LEDGER) for policy in RESERVING]
    return [
        Cell(
            world="published",
            policy=policy,
            permit_store=store,
            workers=1,
            cap=PUBLISHED_CAP,
            tasks=tasks,
            seed=seed,
        )
        for policy, store in pairs
        for seed in range(seeds)
    ]


def fleet(seeds: int, *, tasks: int = FLEET_TASKS, shrink: float = 1.0) -> list[Cell]:
    """Make a fleet that grows beside one job. `shrink` divides the windows."""
    return [
        Cell(
            world=world,
            policy=policy,
            permit_store=LEDGER if policy in RESERVING else PUBLISHED_STORE,
            workers=workers,
            cap=cap,
            tasks=tasks,
            seed=seed,
            window=_window(world, policy, workers, cap, shrink),
        )
        for world, policies in (("realistic", POLICIES), ("realistic-cool", ("off", "local")))
        for cap in FLEET_CAPS
        for workers in FLEET_WORKERS
        for policy in policies
        for seed in range(seeds)
    ]


def _window(world: str, policy: str, workers: int, cap: int, shrink: float) -> float | None:
    """Choose the window: to the end if permits come first and the cap is 100, else a short one."""
    if policy not in RESERVING:
        return WINDOWS[world][workers] / shrink
    return None if cap > PUBLISHED_CAP else SMALL_CAP_WINDOW / shrink


def measure(cell: Cell) -> Row:
    """Run one cell here."""
    return simulate(cell.scenario()).row()


def measure_all(cells: Sequence[Cell], *, processes: int | None = None) -> list[Row]:
    """Run all cells, by default with one process for each CPU; rows in the order of the cells.

    The result of a cell depends only on its seed, not on the process that it ran in.
    """
    processes = processes or cpus()
    rows: dict[int, Row] = {}
    for place, row in _spread(cells, processes) if processes > 1 else _one_by_one(cells):
        rows[place] = row
        _progress(len(rows), len(cells))
    return [rows[place] for place in range(len(cells))]


def _one_by_one(cells: Sequence[Cell]) -> Iterator[tuple[int, Row]]:
    for place, cell in enumerate(cells):
        yield place, measure(cell)


def _spread(cells: Sequence[Cell], processes: int) -> Iterator[tuple[int, Row]]:
    """Run the longest ones first, so that no long one is left alone at the end."""
    order = sorted(range(len(cells)), key=lambda place: -_weight(cells[place]))
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=fresh) as pool:
        places = {pool.submit(measure, cells[place]): place for place in order}
        for done in as_completed(places):
            yield places[done], done.result()


def _weight(cell: Cell) -> float:
    return float(cell.tasks * cell.workers * (1 if cell.policy in RESERVING else 10))


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == of else ""
        print(f"\r{done} of {of} simulations", end=end, file=sys.stderr, flush=True)
