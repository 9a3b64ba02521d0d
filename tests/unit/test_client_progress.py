"""Progress, shown from counters at instants."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from conveyor.client.progress import FREE_COLUMNS, BarView, LineView, describe, view_for
from conveyor.client.watch import summary
from conveyor.client.wire import OutageReply, RunReply, RunWaitReply, StatsReply


def run(done: int, total: int = 100, *, failed: int = 0, **fields: Any) -> RunReply:
    stats = StatsReply(total=total, completed=done, successful=done - failed, failed=failed)
    values = {"status": "running", **fields}
    return RunReply(run_id="R", job_id="J", stats=stats, **values)


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


def test_lines_need_two_steps_forward_for_a_rate_and_never_divide_by_nothing() -> None:
    stream = io.StringIO()
    view = LineView(stream)
    for now, done in ((0.0, 0), (3.0, 50), (3.0, 60), (6.0, 40), (9.0, 80)):
        view.show(run(done), now)
    rates = [line.partition("failed, ")[2] for line in stream.getvalue().splitlines()]
    assert rates == ["0.0/s, - left"] * 3 + ["8.3/s, 3.0 s left"]


def test_a_run_that_is_paused_or_over_has_neither_a_rate_nor_time_left() -> None:
    stream = io.StringIO()
    LineView(stream).show(run(40, status="stopped"), 0.0)
    assert stream.getvalue() == "stopped: 40/100 done, 40 ok, 0 failed\n"
    for still in (run(40, status="stopped"), run(40, pause_state="paused")):
        shown = drawn(still, width=100)
        assert "/s" not in shown
        assert ":" not in shown


def test_a_paused_run_is_resumed_at_the_server_that_was_named() -> None:
    stream = io.StringIO()
    LineView(stream, "http://h:1/?a b").show(run(1, pause_state="paused"), 0.0)
    expected = "resume it with: conveyor resume J --server 'http://h:1/?a b'\n"
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


def draw(*states: RunReply, stream: io.StringIO, width: int) -> str:
    """The end of a terminal of `width` columns, a second and a state later each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        with BarView(stream) as view:
            for second, state in enumerate(states):
                view.show(state, second)
    return stream.getvalue()


def drawn(state: RunReply, *, width: int) -> str:
    """The line where two earlier states gave a rate of 10 tasks a second."""
    before = run(state.stats.completed - 20), run(state.stats.completed - 10)
    (line,) = draw(*before, state, stream=io.StringIO(), width=width).splitlines()
    return line


def test_the_bar_fills_the_room_and_leaves_out_what_has_none() -> None:
    state = run(40, failed=2)
    assert drawn(state, width=70) == (
        "running ━━━━━━━━━               40/100 38 ok 2 failed 10.0/s 0:00:06"
    )
    assert drawn(state, width=50) == "running ━━━━       40/100 38 ok 2 failed 0:00:06"
    assert drawn(state, width=40) == "running ━━━━━╸         40/100 2 failed"
    assert drawn(state, width=34) == "running ━━━      40/100 2 failed"
    assert drawn(state, width=33).split() == ["running", "40/100", "2", "failed"]
    assert drawn(state, width=20).split() == ["40/100", "2", "failed"]
    assert drawn(state, width=10).split() == ["40/100"]


@pytest.mark.parametrize("state", ["running", "completed", "waiting for tasks"])
def test_the_bar_never_needs_a_second_line(state: str) -> None:
    for width in range(1, 120):
        line = draw(
            run(12_345, 100_000, status=state), stream=io.StringIO(), width=width
        ).removesuffix("\n")
        assert "\n" not in line
        assert len(line) <= max(width - FREE_COLUMNS, 0)


def test_a_run_without_tasks_has_an_empty_bar() -> None:
    assert "━" not in draw(run(0, total=0), stream=io.StringIO(), width=80)
    assert "━" * 20 in draw(run(9, total=9), stream=io.StringIO(), width=80)


def test_the_bar_can_be_seen_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "━" * 8 in draw(run(0), stream=Screen(), width=80)


def test_without_colour_done_and_open_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = draw(run(50), stream=Screen(), width=80)
    assert "━" * 8 in shown
    assert " " * 8 in shown
    assert "\x1b[3" not in shown


def test_a_bar_in_ascii_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("5", "20", "50", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding="ascii", errors="backslashreplace")
        with BarView(stream) as view:
            view.show(run(30), 0.0)
        stream.flush()
        assert "\\u" not in written.getvalue().decode()


def test_only_failures_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m" not in draw(run(9), stream=Screen(), width=80)
    assert "\x1b[31m1 failed" in draw(run(9, failed=1), stream=Screen(), width=80)


def test_the_last_state_of_a_run_stays_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = draw(run(100, status="completed"), stream=Screen(), width=80)
    assert "completed" in shown.rpartition("\x1b[2K")[2]


def test_trouble_is_shown_beside_the_bar_until_the_server_answers() -> None:
    stream = io.StringIO()
    with BarView(stream) as view:
        view.trouble("before any answer", 0.0)
        view.show(run(1), 1.0)
        view.trouble("no answer", 2.0)
    assert "no answer, trying again" in stream.getvalue()
    back = io.StringIO()
    with BarView(back) as view:
        view.show(run(1), 1.0)
        view.trouble("no answer", 2.0)
        view.show(run(2), 3.0)
    assert "running" in back.getvalue()
    assert "no answer" not in back.getvalue()


def test_the_bar_shows_counts_rate_and_state() -> None:
    shown = draw(run(0), run(20), run(40, failed=2), stream=io.StringIO(), width=120)
    for part in ("running", "40/100", "38 ok", "2 failed", "20.0/s", "0:00:03"):
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
    without = msgspec.structs.replace(ended, failure_reason=None)
    assert summary(without, 61).endswith(" in 1 min 1 s; pay\\x07")


def test_a_run_that_waits_for_something_shared_says_so() -> None:
    outage = OutageReply(shared="gateway", detail="the gateway http://gw.test/ cannot be reached")
    waiting = run(1, outage=outage)
    assert describe(waiting) == "waiting for the gateway"
    assert describe(run(1, outage=outage, pause_state="paused")) == "paused"
    stream = io.StringIO()
    LineView(stream).show(waiting, 0.0)
    assert stream.getvalue().startswith("waiting for the gateway: 1/100 done")
    assert stream.getvalue().endswith("; the gateway http://gw.test/ cannot be reached\n")


def test_a_run_that_waits_says_why_and_one_at_its_cap_is_running_all_the_same() -> None:
    nobody = run(1, waiting=RunWaitReply(reason="no_worker", detail="no worker has said a word"))
    capped = run(1, waiting=RunWaitReply(reason="max_inflight", detail="the cap is in use: 2 of 2"))
    assert (describe(nobody), describe(capped)) == ("waiting: no worker", "running")
    hosts = run(1, waiting=RunWaitReply(reason="host_closed", detail="it waits for its hosts"))
    assert describe(hosts) == "waiting for its hosts"
    stream = io.StringIO()
    view = LineView(stream)
    view.show(capped, 0.0)
    view.show(nobody, 0.1)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("; waiting because max_inflight: the cap is in use: 2 of 2")
    assert second.endswith("; waiting because no_worker: no worker has said a word")


@pytest.mark.parametrize(("reason", "told"), [("max_inflight", "max inflight"), ("slots", "slots")])
def test_the_bar_says_what_bounds_a_run_that_works(reason: str, told: str) -> None:
    bounded = run(40, 100, waiting=RunWaitReply(reason=reason, detail="it is in use"))
    for width in (60, 80, 120):
        assert f"running: {told} " in draw(bounded, stream=io.StringIO(), width=width)
