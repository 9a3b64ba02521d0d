"""The table and the bars of simulations."""

from __future__ import annotations

import io

from rich.console import Console

from conveyor.simulation.view import (
    ASCII,
    CAP,
    FIGURES,
    LINE_INTERVAL,
    PERMITS,
    POLICY,
    WIDTH,
    WORKERS,
    WaitingLine,
    bars,
    brief,
    groups,
    spread,
    table,
    tables,
    width_of,
)
from tests.unit.simulated_rows import FIELDS, row


def drawn(*rows: object, width: int | None = None) -> list[str]:
    made = table(groups(rows), (POLICY, *FIGURES))  # type: ignore[arg-type]
    stream = io.StringIO()
    Console(file=stream, width=width or width_of(made)).print(made)
    return stream.getvalue().splitlines()


def test_rows_that_differ_in_their_seed_alone_are_one_group() -> None:
    rows = [row(), row(seed=1), row(policy="off"), row(seed=2), row(workers=10)]

    assert [len(group) for group in groups(rows)] == [3, 1, 1]


def test_a_spread_shows_what_differs() -> None:
    assert spread([2.0, 1.0, 6.0], "{:.0f}".format) == "1 / 3 / 6"
    assert spread([1.001, 1.002], "{:.2f}".format) == "1.00"
    assert spread([], "{:.2f}".format) == "–"


def test_short_times_are_in_milliseconds_and_never_nothing() -> None:
    times = (0.001, 0.00149, 0.0994, 0.0996, 0.25, 59.0, 60.0)
    assert [brief(seconds) for seconds in times] == [
        *("1 ms", "1.5 ms", "99 ms", "0.1 s", "0.2 s", "59 s", "1 min 0 s"),
    ]


def test_the_table_tells_a_run_to_the_end_from_one_cut_off() -> None:
    lines = drawn(
        row(),
        row(policy="off", completed=312, window_s=7.5, elapsed_s=7.5, amplification=226.7),
        row(policy="local", completed=0, window_s=0.1, elapsed_s=0.1, amplification=None),
    )
    ended, cut, nothing = (line.split() for line in lines[-3:])

    assert ended[:3] == ["reserve", "20,000", "1.00"]
    assert ended[-4:] == ["8", "min", "4", "s"]
    assert cut[:3] == ["off", "312", "227"]
    assert cut[-3:] == [">", "7.5", "s"]
    assert nothing[:3] == ["local", "0", "–"]


def test_the_table_of_the_usual_policies_fits_a_terminal() -> None:
    lines = drawn(*(row(policy=policy, bounces=47_498) for policy in ("reserve", "local", "off")))

    assert max(map(len, lines)) <= 80


def test_a_narrow_terminal_folds_words_and_keeps_figures() -> None:
    lines = drawn(row(policy="reserve-strict"), width=76)

    assert max(map(len, lines)) <= 76
    assert "…" not in "".join(lines)
    assert "20,000" in "".join(lines)


def test_a_table_of_many_seeds_goes_on_below_itself() -> None:
    rows = [
        row(
            policy="reserve-strict",
            permit_store="count-then-insert",
            seed=seed,
            bounces=10_000_000 * seed,
            amplification=999.0 * seed,
            receive_calls_per_task=1_111.0 * seed,
            permit_calls_per_task=2_222.0 * seed,
            completed=1_000_000 - seed,
            elapsed_s=3_599.0 * seed,
            peak_in_flight=100_000 - seed,
            seconds_over_cap=123_456.0 * seed,
            utilisation_steady=0.111 * seed,
        )
        for seed in (1, 5, 9)
    ]
    columns = (CAP, WORKERS, POLICY, PERMITS, *FIGURES)
    parts = tables(groups(rows), columns)

    assert len(parts) > 1
    assert max(map(width_of, parts)) <= WIDTH
    shown = [str(column.header) for made in parts for column in made.columns]
    assert [title for title in shown if title in [column.title for column in FIGURES]] == [
        column.title for column in FIGURES
    ]
    assert shown.count("policy") == shown.count("workers") == len(parts)


def test_a_table_that_fits_is_one() -> None:
    assert len(tables(groups([row()]), (POLICY, *FIGURES))) == 1


def test_bars_are_logarithmic_from_one_on() -> None:
    rows = [
        row(policy="reserve"),
        row(policy="local", amplification=10.0),
        row(policy="off", amplification=100.0),
        row(policy="local-exact", amplification=None),
    ]
    *lines, ticks = bars(groups(rows), width=60, glyphs=ASCII)
    lengths = [line.count("#") for line in lines]

    assert lengths[0] == lengths[3] == 0
    assert abs(2 * lengths[1] - lengths[2]) <= 1
    assert max(map(len, lines)) <= 60
    assert [line.split()[-1].strip("|") for line in lines] == ["1.00", "10.00", "100", "-"]
    assert ticks.split() == ["1", "10", "100"]
    assert ticks.index("100") == len("local-exact |") - 1 + lengths[2]


def test_a_row_made_by_hand_has_the_fields_in_order() -> None:
    assert tuple(row()) == FIELDS


def test_waiting_is_told_once_a_while_where_nothing_can_be_drawn() -> None:
    stream = io.StringIO()
    line = WaitingLine(stream)
    line.show("simulating reserve")
    line.tick(1.0)
    line.tick(2.0)
    line.show("simulating off")
    line.tick(3.0)
    line.tick(3.0 + LINE_INTERVAL)

    assert stream.getvalue().splitlines() == [
        "simulating reserve … 1.0 s",
        "simulating off … 3.0 s",
        "simulating off … 13 s",
    ]


def test_what_is_over_within_a_second_is_not_told() -> None:
    stream = io.StringIO()
    with WaitingLine(stream) as line:
        line.show("simulating reserve")

    assert stream.getvalue() == ""
