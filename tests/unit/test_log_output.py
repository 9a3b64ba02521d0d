"""Log lines never wait for a reader: what finds no room is lost, counted and told."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from conveyor.aio import log_output
from conveyor.aio.log_output import MOST_WAITING, LogOutput, lost_lines
from conveyor.engine.telemetry import Telemetry

LINE = "x" * 999


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that nobody reads yet: its ends to read and to write."""
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        try:
            os.close(end)
        except OSError:
            continue


@pytest.fixture
def root() -> logging.Logger:
    """The root logger."""
    return logging.getLogger()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("conveyor.x", logging.INFO, "", 0, text, None, None)


def all_lines(read: int) -> list[str]:
    """Read until the other end is closed."""
    with os.fdopen(read, "rb") as output:
        return output.read().decode().splitlines()


def test_lines_arrive_in_order_and_whole(pipe: tuple[int, int]) -> None:
    read, write = pipe
    output = LogOutput(write)
    for number in range(20):
        output.emit(record(f"{number} é"))
    output.close()
    os.close(write)

    assert all_lines(read) == [f"{number} é" for number in range(20)]


@pytest.mark.parametrize("blocking", [True, False])
def test_what_nobody_reads_is_lost_counted_and_told(
    pipe: tuple[int, int],
    root: logging.Logger,
    blocking: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = pipe
    os.set_blocking(write, blocking)
    output = LogOutput(write)
    output.setFormatter(logging.Formatter("%(message)s %(lines)s", defaults={"lines": ""}))
    root.handlers[:] = [output]
    emitted = 3 * MOST_WAITING // len(LINE)

    # With a handler that waits for its reader, this would not end.
    for number in range(emitted):
        output.emit(record(f"{number} {LINE}"))

    lost = lost_lines()
    assert emitted // 3 < lost < emitted
    metric = next(one for one in Telemetry().collect() if one.name == "conveyor_log_lines_lost")
    assert metric.samples[0].value == lost

    numbers: list[int] = []
    told, rest = 0, b""
    while len(numbers) + told < emitted:
        *lines, rest = (rest + os.read(read, 65_536)).split(b"\n")
        for line in lines:
            head, _, text = line.decode().partition(" ")
            if head == "log":
                told += int(text.removeprefix("lines were lost "))
            else:
                assert text == f"{LINE} "
                numbers.append(int(head))
    assert told == lost
    assert numbers == sorted(set(numbers))
    output.emit(record("again"))
    monkeypatch.setattr(log_output, "FLUSH_SECONDS", 60.0)
    output.close()
    assert os.read(read, 100) == b"again \n"


def test_an_output_that_is_gone_stops_nothing(pipe: tuple[int, int], root: logging.Logger) -> None:
    read, write = pipe
    os.close(read)
    output = LogOutput(write)
    root.handlers[:] = [output]
    for number in range(1, 4):
        output.emit(record("nobody"))
        output.flush()
        assert output.lost == number

    output.close()
    assert output.lost == 3
