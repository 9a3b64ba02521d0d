"""Bytes on their way, shown: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re

import pytest

from conveyor.client.output import size
from conveyor.client.progress import (
    FREE_COLUMNS,
    BarTransferView,
    LineTransferView,
    meter_for,
)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (40_200_000, "40.2 MB"),
        (4_500_000_000, "4.5 GB"),
        (12_345_000_000_000, "12.3 TB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert size(number) == text


def test_what_is_quick_says_nothing_and_what_is_not_a_line_every_three_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with LineTransferView(stream, clock) as meter:
        meter.begin("sending a.csv", 10_000)
        for tenth in range(1, 70):
            clock.now = 100 + tenth / 10
            meter.move(tenth * 100)
        meter.begin("checking a.csv")
        clock.now = 109.0
        meter.move()
        clock.now = 112.5
        meter.move()
    assert stream.getvalue().splitlines() == [
        "sending a.csv: 3.0 kB of 10.0 kB",
        "sending a.csv: 6.0 kB of 10.0 kB",
        "checking a.csv: for 2.1 s",
        "checking a.csv: for 5.6 s",
    ]
    quick = io.StringIO()
    with LineTransferView(quick, clock) as meter:
        meter.begin("sending a.csv", 10)
        meter.move(10)
    assert quick.getvalue() == ""


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "meter"), [("dumb", LineTransferView), ("xterm", BarTransferView)]
)
def test_a_terminal_that_cannot_draw_gets_lines(
    monkeypatch: pytest.MonkeyPatch, kind: str, meter: type
) -> None:
    monkeypatch.setenv("TERM", kind)
    assert type(meter_for(Screen(), Clock())) is meter
    assert type(meter_for(io.StringIO(), Clock())) is LineTransferView


CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def draw(*moves: int, width: int, total: int | None, step: str = "sending a") -> str:
    """Move the bar once a second; return its last text before it was erased."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm")
        clock, stream = Clock(), Screen()
        meter = BarTransferView(stream, clock)
        # Rich's thread would draw between the truncation and the refresh of a busy machine.
        meter.live.auto_refresh = False
        with meter:
            meter.begin(step, total)
            for done in moves:
                clock.now += 1
                meter.move(done)
            stream.seek(0)
            stream.truncate()
            meter.refresh()
            shown = stream.getvalue()
    return CONTROLS.sub("", shown)


def test_the_bar_fills_the_room_and_leaves_out_what_has_none() -> None:
    def drawn(width: int) -> str:
        return re.sub("[━╸╺]+", "===", draw(30_000, 40_000, width=width, total=100_000))

    assert drawn(66) == "sending a === 40.0/100.0 kB 10.0 kB/s 0:00:06"
    assert drawn(50) == "sending a === 40.0/100.0 kB 0:00:06"
    assert drawn(36) == "sending a === 40.0/100.0 kB"
    assert drawn(28).split() == ["sending", "a", "40.0/100.0", "kB"]
    assert drawn(18).split() == ["40.0/100.0", "kB"]


@pytest.mark.slow
@pytest.mark.parametrize("total", [1_000_000_000, None])
def test_the_bar_never_needs_a_second_line(total: int | None) -> None:
    for width in range(1, 120):
        shown = draw(23_456_789, 123_456_789, width=width, total=total)
        assert "\n" not in shown
        assert len(shown) <= max(width - FREE_COLUMNS, 0)


def test_the_bar_does_not_fail_at_its_ends() -> None:
    assert "0.0/100.0 kB ? -:--:--" in draw(0, width=80, total=100_000)
    assert "100.0/100.0 kB" in draw(50_000, 100_000, width=80, total=100_000)
    assert "0:00:00" in draw(50_000, 100_000, width=80, total=100_000)
    assert "200.0/100.0 kB" in draw(50_000, 200_000, width=80, total=100_000)
    assert "0/0 bytes" in draw(0, width=80, total=0)


def test_the_bar_shows_a_step_and_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Screen()
    with BarTransferView(stream, clock) as meter:
        meter.begin("sending [a].csv", 4_000)
        for done in (1_000, 2_000):
            clock.now += 1
            meter.move(done)
        meter.refresh()
        meter.begin("checking {a}.csv")
        clock.now += 7
        meter.move()
        meter.refresh()
    shown = stream.getvalue()
    assert "sending [a].csv" in shown
    assert "2.0/4.0 kB 1.0 kB/s 0:00:02" in shown
    assert "checking {a}.csv" in shown
    assert "0:00:07" in shown
    assert shown.endswith("\x1b[2K")
    assert "\x1b[3" not in shown
