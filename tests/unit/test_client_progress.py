"""Progress, told by counters at instants."""

from __future__ import annotations

import io

import pytest

from conveyor.client.progress import (
    BarGlyphs,
    BarView,
    LineView,
    Rate,
    describe,
    run_line,
    time_left,
    view_for,
)
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
        (run(50), 0.0, "-"),
        (run(50, pause_state="paused"), 10.0, "-"),
        (run(100), 10.0, "-"),
    ],
)
def test_time_left(state: RunReply, rate: float, left: str) -> None:
    assert time_left(state, rate) == left


def test_states_are_described_and_unknown_ones_escaped() -> None:
    assert describe(run(1, pause_state="paused")) == "paused"
    assert describe(run(1, status="completed", pause_state="paused")) == "completed"
    assert describe(run(1, status="pending")) == "waiting for tasks"
    assert describe(run(1, status="pending", ingest_status="pending")) == "ingesting"
    assert describe(run(1, status="stopped", ingest_status="pending")) == "stopped"
    assert describe(run(1, ingest_status="done")) == "running"
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


def test_a_run_that_is_over_has_neither_a_rate_nor_time_left() -> None:
    stream = io.StringIO()
    LineView(stream).show(run(40, status="stopped"), 0.0)
    assert stream.getvalue() == "stopped: 40/100 done, 40 ok, 0 failed\n"
    for status in ("stopped", "completed"):
        shown = drawn(run(40, status=status), width=100)
        assert "/s" not in shown
        assert "left" not in shown


def test_a_paused_run_is_gone_on_with_at_the_server_that_was_named() -> None:
    stream = io.StringIO()
    LineView(stream, "http://h:1/?a b").show(run(1, pause_state="paused"), 0.0)
    expected = "go on with: conveyor resume J --server 'http://h:1/?a b'\n"
    assert stream.getvalue().endswith(expected)


def test_trouble_is_told_once_and_so_is_its_end() -> None:
    stream = io.StringIO()
    view = LineView(stream)
    view.show(run(1), 0.0)
    for second in range(1, 20):
        view.trouble("no answer", second)
    for tenth in range(200, 220):
        view.show(run(2), tenth / 10)
    lines = stream.getvalue().splitlines()
    assert lines[1:3] == ["no answer", "the server answers again"]
    assert [line.partition(":")[0] for line in lines] == [
        "running",
        "no answer",
        "the server answers again",
        "running",
    ]


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "view"), [("dumb", LineView), ("xterm", BarView)])
def test_a_terminal_that_cannot_draw_gets_lines(
    monkeypatch: pytest.MonkeyPatch, kind: str, view: type
) -> None:
    monkeypatch.setenv("TERM", kind)
    assert type(view_for(Screen())) is view
    assert type(view_for(io.StringIO())) is LineView


def drawn(state: RunReply, *, width: int, rate: float = 10.0) -> str:
    return run_line(
        state, rate, state=describe(state), width=width, glyphs=BarGlyphs("#", "-")
    ).plain


def test_the_bar_fills_the_room_and_leaves_out_what_has_none() -> None:
    state = run(40, failed=2)
    assert drawn(state, width=70) == (
        "running ########-------------- 40/100 38 ok 2 failed 10.0/s 6.0 s left"
    )
    assert drawn(state, width=50) == "running ###------ 40/100 38 ok 2 failed 6.0 s left"
    assert drawn(state, width=32) == "running ###----- 40/100 2 failed"
    assert drawn(state, width=30) == "running 40/100 2 failed"
    assert drawn(state, width=20) == "running 40/100 2 fai"


@pytest.mark.parametrize("state", ["running", "completed", "waiting for tasks"])
def test_the_bar_never_needs_a_second_line(state: str) -> None:
    for width in range(1, 120):
        assert len(drawn(run(12_345, 100_000, status=state), width=width)) <= width


def test_the_bar_can_be_seen_before_anything_is_done_and_without_colour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    with BarView(stream) as view:
        view.show(run(0), 0.0)
    assert "─" * 8 in stream.getvalue()
    assert all(len(line) <= 78 for line in stream.getvalue().splitlines())


def test_a_bar_in_ascii_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("20", "50", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding="ascii", errors="backslashreplace")
        with BarView(stream) as view:
            view.show(run(30), 0.0)
        stream.flush()
        assert "\\u" not in written.getvalue().decode()


def test_only_failures_are_red() -> None:
    def styles(state: RunReply) -> set[str]:
        text = run_line(state, 1.0, state="running", width=100, glyphs=BarGlyphs())
        return {str(span.style) for span in text.spans}

    assert "red" not in styles(run(9))
    assert "red" in styles(run(9, failed=1))


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
