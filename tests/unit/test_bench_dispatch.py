"""The dispatch benchmark: its cells, what it makes of rows, its plot, and small measurements."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.dispatch import _print_tables
from bench.dispatch_fairness import ARRIVALS, fairness_markdown
from bench.dispatch_grid import (
    FLEET_CAPS,
    FLEET_WORKERS,
    POLICIES,
    RESERVING,
    Cell,
    fleet,
    head_to_head,
    measure_all,
)
from bench.dispatch_summary import findings, markdown, plot_of, split
from bench.flight import Flight
from bench.harness import WIDTH
from bench.plot import PANEL_HEIGHT, Panel, Plot, svg
from bench.realtime import measure_real_time
from conveyor.simulation import PICKINGS
from conveyor.simulation.view import Row
from tests.unit.simulated_rows import FIELDS, row

SVG = "{http://www.w3.org/2000/svg}"


def test_the_published_comparison_holds_every_policy_to_the_same_work() -> None:
    cells = head_to_head(5)

    assert {cell.seed for cell in cells} == set(range(5))
    assert {(cell.world, cell.workers, cell.cap, cell.tasks, cell.window) for cell in cells} == {
        ("published", 1, 5, 500, None)
    }
    assert {(cell.policy, cell.permit_store) for cell in cells} == {
        ("off", "count-then-insert"),
        ("local", "count-then-insert"),
        ("local-exact", "count-then-insert"),
        ("off", "atomic-rows"),
        ("local", "atomic-rows"),
        ("local-exact", "atomic-rows"),
        ("reserve-strict", "ledger"),
        ("reserve", "ledger"),
    }


def test_the_fleets_are_windowed_but_where_permits_come_first_at_a_cap_of_100() -> None:
    cells = fleet(1)

    realistic = [cell for cell in cells if cell.world == "realistic"]
    assert len(realistic) == len(FLEET_CAPS) * len(FLEET_WORKERS) * len(POLICIES)
    for cell in cells:
        to_the_end = cell.policy in RESERVING and cell.cap == 100
        assert (cell.window is None) == to_the_end, cell
    assert {cell.policy for cell in cells if cell.world == "realistic-cool"} == {"off", "local"}


def test_policies_that_must_be_equal_share_their_window() -> None:
    windows: dict[tuple[str, int, int], set[float | None]] = {}
    for cell in fleet(1):
        if cell.policy in ("off", "local"):
            windows.setdefault((cell.world, cell.cap, cell.workers), set()).add(cell.window)

    assert all(len(found) == 1 for found in windows.values())


@pytest.mark.slow
def test_rows_do_not_depend_on_the_process_that_made_them() -> None:
    cells = [
        Cell(
            world="published",
            policy=policy,
            permit_store="ledger",
            workers=1,
            cap=5,
            tasks=40,
            seed=seed,
        )
        for policy in ("reserve", "local")
        for seed in (0, 1)
    ]
    here, elsewhere = measure_all(cells, processes=1), measure_all(cells, processes=2)

    assert here == elsewhere
    assert [(made["policy"], made["seed"]) for made in here] == [
        (cell.policy, cell.seed) for cell in cells
    ]
    assert all(tuple(made) == FIELDS for made in here)
    assert [tuple(json.loads(json.dumps(made))) for made in here] == [FIELDS] * len(here)


def test_a_section_a_world() -> None:
    sections = split(
        [
            row(world="published", workers=1, cap=5, tasks=500),
            row(world="published", workers=1, cap=5, tasks=500, seed=1),
            row(),
            row(workers=10),
        ]
    )

    assert [len(shown) for _title, shown, _columns in sections] == [1, 2]
    assert "minimum / mean / maximum of 2 seeds, cap 5, workers 1" in sections[0][0]
    assert [column.title for column in sections[1][2][:3]] == ["cap", "workers", "policy"]


def test_what_is_printed_fits_a_hundred_columns_at_its_widest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        row(
            world=world,
            policy=policy,
            permit_store="count-then-insert",
            cap=100,
            seed=seed,
            completed=20_000 - seed,
            amplification=1_234.0 * seed,
            receive_calls_per_task=1_111.0 * seed,
            permit_calls_per_task=2_222.0 * seed,
            bounces=10_000_000 * seed,
            peak_in_flight=1_000 * seed,
            seconds_over_cap=1_234.0 * seed,
            utilisation_steady=0.111 * seed,
            elapsed_s=3_599.0 * seed,
        )
        for world in ("published", "realistic", "realistic-cool")
        for policy in POLICIES
        for seed in (1, 5, 9)
    ]
    _print_tables(rows)
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) <= WIDTH
    assert "…" not in "".join(lines)
    assert sum("reserve-strict" in line for line in lines) >= 6
    assert '"gate on" is reserve, "gate off" is off.' in lines


def test_the_table_of_small_runs_fits_a_hundred_columns_at_its_widest() -> None:
    rows: list[Row] = [
        {
            "arrival": arrival,
            "picking": picking,
            "giant": 100_000,
            **dict.fromkeys(("mean_s", "p90_s", "max_s", "times_alone"), 1_234.56),
        }
        for arrival in ARRIVALS
        for picking in PICKINGS
    ]

    assert max(map(len, fairness_markdown(rows).splitlines())) <= WIDTH


def test_the_findings_stand_beside_the_published_figures() -> None:
    told = findings(
        [
            row(world="published", policy="off", permit_store="count-then-insert", amplification=a)
            for a in (4.0, 5.0)
        ]
        + [row(world="published", policy="off", permit_store="atomic-rows", amplification=9.0)]
    )

    assert told[0] == "off: 4.00 / 4.50 / 5.00 messages a task; published: 4.79"


def test_messages_received_in_vain_are_not_hidden() -> None:
    (told,) = findings([row(receives=20_003), row(policy="reserve-strict", bounces=2)])

    assert told.startswith("reserve and reserve-strict, 2 simulations: 2 bounces, 0 s over the cap")
    assert told.endswith("3 messages received in vain")


def test_a_gate_is_said_to_do_nothing_only_where_the_traces_are_equal() -> None:
    equal = [row(policy=policy, workers=count) for policy in ("off", "local") for count in (4, 10)]
    different = [row(policy="off", cap=5), row(policy="local", cap=5, trace_hash="b" * 64)]
    (told,) = findings(equal + different)

    assert told == (
        "local did exactly what off did (same trace) in realistic at a cap of 100: workers 4, 10"
    )
    assert findings(different) == []


def _bars(drawing: str) -> list[float]:
    """The heights of the bars in a drawing, in order; background and legend are no bars."""
    rects = ElementTree.fromstring(drawing).iter(f"{SVG}rect")
    return [
        float(rect.attrib["height"]) for rect in rects if rect.attrib.get("y") not in (None, "56")
    ]


def test_the_plot_is_logarithmic_and_names_everything() -> None:
    plot = Plot(
        title="Received <twice>",
        subtitle="a & b",
        x_label="workers",
        y_label="messages",
        series=("off", "local", "reserve"),
        panels=[Panel("cap 5", ("1", "4"), ((100.0, 10.0, 1.0), (None, 3.0, 0.5)))],
    )
    drawing = svg(plot)
    texts = [text.text for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]

    hundred, ten, one, three, half = _bars(drawing)
    assert hundred == pytest.approx(PANEL_HEIGHT)
    assert ten == pytest.approx(PANEL_HEIGHT / 2)
    assert 0 < one == half < three < ten
    for word in (
        "Received <twice>",
        "a & b",
        "workers",
        "messages",
        *plot.series,
        "cap 5",
        "1,000",
    ):
        assert (word in texts) == (word != "1,000"), word
    assert svg(plot) == drawing


def test_the_plot_of_rows_has_a_panel_a_cap() -> None:
    plot = plot_of([row(policy="off", amplification=67.8), row(), row(cap=5, workers=1)])

    assert [panel.title for panel in plot.panels] == ["cap 5", "cap 100"]
    assert plot.panels[1].values[1] == [67.8, None, None, None, 1.0]
    assert plot.panels[0].values[0] == [None, None, None, None, 1.0]


def test_the_summary_is_markdown_with_every_row() -> None:
    text = markdown([row(), row(policy="off", workers=10)], "1 × CPU")

    assert text.count("\n| 100 |") == 2
    assert "| cap | workers | policy | done | received a task |" in text
    assert "1 × CPU" in text


def test_time_over_the_cap_is_counted() -> None:
    now = 10.0
    flight = Flight(cap=1)
    with flight.call(lambda: now):
        now = 12.0
        with flight.call(lambda: now):
            now = 12.5
        now = 13.0

    assert (flight.peak, flight.seconds_over_cap, flight.call_seconds) == (2, 0.5, 3.5)
    assert (flight.last_start, flight.until_last_start) == (12.0, 2.0)


@pytest.mark.slow
def test_in_real_time_every_task_is_done_and_reserve_receives_nothing_in_vain(
    tmp_path: Path,
) -> None:
    rows = {made["policy"]: made for made in measure_real_time(tmp_path, tasks=60)}

    assert list(rows) == ["off", "local", "reserve"]
    for made in rows.values():
        assert tuple(made) == FIELDS
        assert (made["completed"], made["dead_lettered"]) == (60, 0)
    reserve = rows["reserve"]
    assert (reserve["receives"], reserve["bounces"], reserve["seconds_over_cap"]) == (60, 0, 0)
