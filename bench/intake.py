"""Measures the rows per second that the child process checks and stages, and its memory.

The real process is fed from a file and writes its frames to a file; the time is from its start to
its end, the start of the interpreter included. The figures at several sizes show whether memory
grows with the list: it must not for files; a document is held as a whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.harness import ROOT, Options, Row, Scenario, median
from bench.processes import memory
from conveyor.domain.submission import Limits
from conveyor.intake.frames import HEADER, Csv, Done, ListSource, ValidationRequest, decode_frame

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
MOST_BYTES = 2**31
MOST_IN_DOCUMENT = 100_000
POLL_SECONDS = 0.01
SHARES = (100, 10, 1)
"""The sizes measured are these fractions of the largest."""


def url(number: int) -> str:
    """Return one of many URLs on a thousand hosts."""
    return f"https://shop{number % 977}.example.com/products/item-{number}?ref=a"


def json_task(number: int) -> str:
    """Return a task with an external id."""
    return f'{{"url":"{url(number)}","external_id":"sku-{number}"}}'


def json_labelled(number: int) -> str:
    """Return a task with metadata, which the slow path reads."""
    return f'{{"url":"{url(number)}","external_id":"sku-{number}","metadata":{{"batch":"spring"}}}}'


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of list: the type it is read as, its rows, and the text around and between them."""

    source: ListSource
    row: Callable[[int], str]
    ends: tuple[str, str] = ("", "\n")
    comma: str = "\n"


KINDS = {
    "csv": Kind(ListSource.CSV, lambda number: f"{url(number)},sku-{number}"),
    "csv quoted": Kind(
        ListSource.CSV, lambda number: f'"{url(number)}","sku-{number}"', comma="\r\n"
    ),
    "jsonl": Kind(ListSource.JSONL, json_task),
    "jsonl metadata": Kind(ListSource.JSONL, json_labelled),
    "urls": Kind(ListSource.URLS, url),
    "document": Kind(ListSource.DOCUMENT, json_task, ('{"tasks":[', "]}"), ","),
}


def write_list(path: Path, kind: Kind, rows: int) -> None:
    """Write the list that the child reads."""
    work = ValidationRequest(
        source=kind.source,
        run_id=RUN,
        limits=Limits(max_inline_tasks=rows),
        csv=Csv(url=0, external_id=1) if kind.source is ListSource.CSV else None,
        max_rows=rows,
        max_bytes=MOST_BYTES,
    )
    with path.open("w", newline="") as file:
        file.write(msgspec.json.encode(work).decode() + "\n" + kind.ends[0])
        for number in range(rows):
            file.write((kind.comma if number else "") + kind.row(number))
        file.write(kind.ends[1])


def last_frame(path: Path) -> object:
    """Return the last frame of a file of frames."""
    frame: object = None
    with path.open("rb") as file:
        while head := file.read(HEADER.size):
            letter, length = HEADER.unpack(head)
            frame = decode_frame(letter, file.read(length))
    return frame


def run_child(given: Path, frames: Path) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds and peak resident MB of one child."""
    before = os.times()
    peak = 0
    with given.open("rb") as source, frames.open("wb") as sink:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "conveyor.intake"], stdin=source, stdout=sink, cwd=ROOT
        )
        # The kernel's peak of an ended child is never below its parent's.
        while process.poll() is None:
            peak = max(peak, memory(process.pid, "VmHWM"))
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - started
    assert process.returncode == 0
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return seconds, used, peak / 2**20


def measure(name: str, options: Options, rows: int) -> Row:
    """Measure one kind of list of one size, several times."""
    directory = options.directory("intake")
    given, frames = directory / "given", directory / "frames"
    write_list(given, KINDS[name], rows)
    measured = [run_child(given, frames) for _ in range(options.repeats)]
    done = last_frame(frames)
    assert isinstance(done, Done), done
    assert done.rows == rows
    walls, processors, peaks = zip(*measured, strict=True)
    figures: dict[str, float | int | str] = {
        "rows": rows,
        "rows/s": round(rows / median(walls)),
        "best": round(rows / min(walls)),
        "worst": round(rows / max(walls)),
        "µs CPU/row": round(median(processors) / rows * 1e6, 2),
        "peak RSS MB": round(median(peaks), 1),
        "list MB": round(given.stat().st_size / 2**20, 1),
        "frames MB": round(frames.stat().st_size / 2**20, 1),
    }
    given.unlink()
    frames.unlink()
    return Row(f"{name} {rows:,}", figures)


def run(options: Options) -> list[Row]:
    """Measure every kind of list, at three sizes."""
    rows = []
    for name, kind in KINDS.items():
        if not options.wants(name):
            continue
        most = options.tasks
        if kind.source is ListSource.DOCUMENT:
            most = min(most, MOST_IN_DOCUMENT)
        sizes = [most // share for share in SHARES]
        rows += [measure(name, options, size) for size in sizes if size]
    return rows


SCENARIO = Scenario(name="intake", run=run)
