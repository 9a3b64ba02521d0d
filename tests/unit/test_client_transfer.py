"""Bytes on their way, shown: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest

from conveyor.client.output import size
from conveyor.client.progress import (
    BarGlyphs,
    BarTransferView,
    LineTransferView,
    meter_for,
    transfer_line,
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


def drawn(done: int, *, width: int, rate: float = 10_000.0, total: int = 100_000) -> str:
    return transfer_line(
        "sending a", done, total, rate, width=width, glyphs=BarGlyphs("#", "-")
    ).plain


def test_the_bar_fills_the_room_and_leaves_out_what_has_none() -> None:
    assert drawn(40_000, width=66) == (
        "sending a #######----------- 40.0 kB/100.0 kB 10.0 kB/s 6.0 s left"
    )
    assert drawn(40_000, width=50) == "sending a ####-------- 40.0 kB/100.0 kB 6.0 s left"
    assert drawn(40_000, width=36) == "sending a ###------ 40.0 kB/100.0 kB"
    assert drawn(40_000, width=30) == "sending a 40.0 kB/100.0 kB"
    assert drawn(40_000, width=12) == "sending a 40"


def test_the_bar_never_needs_a_second_line_nor_fails_at_its_ends() -> None:
    for width in range(1, 120):
        assert len(drawn(123_456_789, width=width, total=1_000_000_000)) <= width
    assert " - left" in drawn(0, width=80, rate=0)
    assert "0.0 s left" in drawn(100_000, width=80)
    assert "-" * 8 not in drawn(0, width=80, total=0)


def test_the_bar_shows_a_step_and_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    clock, stream = Clock(), Screen()
    with BarTransferView(stream, clock) as meter:
        meter.begin("sending a.csv", 4_000)
        clock.now += 2
        meter.move(2_000)
        meter._live.refresh()
        meter.begin("checking a.csv")
        clock.now += 7
        meter._live.refresh()
    shown = stream.getvalue()
    assert "2.0 kB/4.0 kB 1.0 kB/s 2.0 s left" in shown
    assert "checking a.csv 7.0 s" in shown
    assert shown.endswith("\x1b[2K")
    assert "\x1b[32m" not in shown
