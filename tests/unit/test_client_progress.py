"""Progress, told by counters at instants."""

from __future__ import annotations

import io

import pytest

from conveyor.client.progress import BarView, LineView, Rate, describe, time_left
from conveyor.client.watch import summary
from conveyor.client.wire import RunReply, StatsReply


def run(done: int, total: int = 100, *, failed: int = 0, **fields: str) -> RunReply:
    stats = StatsReply(total=total, completed=done, successful=done - failed, failed=failed)
    values = {"status": "running", **fields}
    return RunReply(run_id="R", job_id="J", stats=stats, **values)


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    rate = Rate()
    assert rate.per_second() == 0
    rate.add(0, 0)
    assert rate.per_second() == 0
    rate.add(2, 10)
    assert rate.per_second() == 5
    for second in range(3, 40):
        rate.add(second, 10 + (second - 2) * 20)
    assert rate.per_second() == 20


def test_a_rate_is_never_negative_nor_divides_by_nothing() -> None:
    rate = Rate()
    rate.add(1, 10)
    rate.add(1, 20)
    assert rate.per_second() == 0
    rate.add(2, 0)
    assert rate.per_second() == 0


@pytest.mark.parametrize(
    ("state", "rate", "left"),
    [
        (run(50), 10.0, "5.0 s"),
        (run(50), 0.0, "–"),
        (run(50, pause_state="paused"), 10.0, "–"),
        (run(100), 10.0, "0.0 s"),
        (run(50, status="stopped"), 10.0, "0.0 s"),
    ],
)
def test_time_left(state: RunReply, rate: float, left: str) -> None:
    assert time_left(state, rate) == left


def test_states_are_described_and_unknown_ones_escaped() -> None:
    assert describe(run(1, pause_state="paused")) == "paused"
    assert describe(run(1, status="completed", pause_state="paused")) == "completed"
    assert describe(run(1, status="pending")) == "waiting for tasks"
    assert describe(run(1, status="new\x1b[2J")) == "new\\x1b[2J"


def test_plain_lines_come_every_three_seconds_or_when_the_state_changes() -> None:
    stream = io.StringIO()
    view = LineView(stream)
    with view:
        for tenth in range(100):
            view.show(run(tenth), tenth / 10)
        view.show(run(99, pause_state="paused"), 10.0)
        view.show(run(99, pause_state="paused"), 10.1)
        view.show(run(100, status="completed", failed=1), 10.2)
    lines = stream.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "running",
        "running",
        "running",
        "running",
        "paused",
        "completed",
    ]
    assert lines[1] == "running: 30/100 done, 30 ok, 0 failed, 10.0/s, 7.0 s left"
    assert "conveyor resume J" in lines[4]
    assert "99 ok, 1 failed" in lines[5]


def test_trouble_is_told_once_in_a_while() -> None:
    stream = io.StringIO()
    view = LineView(stream)
    for tenth in range(20):
        view.trouble("no answer", tenth / 10)
    assert stream.getvalue() == "no answer\n"


def test_the_bar_shows_counts_rate_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    view = BarView(stream)
    with view:
        view.show(run(0), 0.0)
        view.show(run(40, failed=2), 2.0)
    shown = stream.getvalue()
    for part in ("running", "40/100", "38 ok", "2 failed", "20.0/s", "3.0 s left"):
        assert part in shown
    assert "[" not in shown


def test_a_bar_does_not_read_markup_in_a_state() -> None:
    stream = io.StringIO()
    view = BarView(stream)
    with view:
        view.show(run(0, status="[red]x"), 0.0)
    assert "[red]x" in stream.getvalue()


def test_a_summary_names_the_reasons_and_what_was_not_done() -> None:
    stats = StatsReply(
        total=10,
        completed=8,
        successful=5,
        failed=3,
        failure_reasons={"timeout": 1, "blocked": 2},
    )
    ended = RunReply(
        run_id="R",
        job_id="J",
        status="failed",
        stats=stats,
        failure_reason="insufficient_credits",
        failure_detail="pay\x07",
    )
    assert summary(ended, 61) == (
        "failed: 10 tasks, 5 ok, 3 failed, 2 not done (blocked 2, timeout 1) in 1 min 1 s; "
        "insufficient_credits: pay\\x07"
    )
    assert not ended.succeeded
