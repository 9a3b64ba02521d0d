"""Common parts of all scenarios: options, fresh directories, the machine's facts, rows and their
printing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sqlite3
import statistics
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from bench.command import DEFAULT_WORK, SCENARIOS, WIDTH
from bench.rounds import Rounds

if TYPE_CHECKING:
    from bench.against import Against

__all__ = ["DEFAULT_WORK", "ROOT", "WIDTH"]

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""The interpreter of the environment that scripts/bench makes for the peers."""
_HEAD = re.compile(rb"\S+ (\d+) [0-9a-f]{8}\n")
"""The line before a body in a segment."""
Figure = float | int | str
T = TypeVar("T")


class Ratio(float):
    """A ratio near 1, shown with three decimals."""


class Spread(NamedTuple):
    """The middle, the least and the greatest of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of some values."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a scenario. Each measurement gets a directory of its own in `work`, and
    deletes it if `discards`."""

    work: Path
    repeats: int
    tasks: int
    only: tuple[str, ...] = ()
    speed: float = 1.0
    minutes: float = 10.0
    worked: int = 2_000
    place: str = ""
    discards: bool = False

    def directory(self, name: str) -> Path:
        """Make a fresh directory. Nothing is deleted between runs: on a file system without a
        journal, creating files gets slow after mass deletes."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.work))

    def wants(self, name: str) -> bool:
        """Return whether to measure a row."""
        return not self.only or name in self.only

    def wants_place(self, name: str) -> bool:
        """Return whether to measure in a place."""
        return self.place in ("", name)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a scenario's table."""

    name: str
    figures: dict[str, Figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A benchmark's measurement; bench/command.py has its question and sizes.

    `against` prepares one version of the code for a comparison; None if it offers no comparison.
    """

    name: str
    run: Callable[[Options], list[Row]]
    against: Against | None = None

    @property
    def question(self) -> str:
        """Return the question that it answers."""
        return SCENARIOS[self.name].question

    @property
    def repeats(self) -> int:
        """Return the default number of measurements of each row."""
        return SCENARIOS[self.name].repeats or 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of the machine that the figures depend on."""

    cpu: str
    cpus: int
    memory_gb: float
    system: str
    python: str
    python_optimised: bool
    """Interpreter built with profile-guided optimisation (worth 1.3 to 1.6 ×)."""
    sqlite: str
    file_system: str
    file_us: float
    """Microseconds to create, write and close a file of 4 KB, which bounds every body stored."""
    load: float
    """Load average of the minute before the measurement: other work makes figures lower."""


def machine(work: Path) -> Machine:
    """Measure the facts of this machine, now."""
    return Machine(
        cpu=cpu_model(),
        cpus=cpus(),
        memory_gb=memory_gb(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        python_optimised="--enable-optimizations"
        in (sysconfig.get_config_var("CONFIG_ARGS") or ""),
        sqlite=sqlite3.sqlite_version,
        file_system=file_system(work),
        file_us=round(_file_microseconds(work), 1),
        load=round(os.getloadavg()[0], 2),
    )


def cpu_model() -> str:
    """Return the name of the processor, as the kernel reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_gb() -> float:
    """Return the memory of the machine."""
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a directory."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, point, kind, *_rest = line.split()
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _file_microseconds(work: Path) -> float:
    """Measure the cost of one small file here and now: the median of some batches."""
    directory = Path(tempfile.mkdtemp(prefix="files-", dir=work))
    body, batch, costs = bytes(4_096), 200, []
    for first in range(0, 10 * batch, batch):
        started = time.perf_counter()
        for number in range(first, first + batch):
            (directory / str(number)).write_bytes(body)
        costs.append((time.perf_counter() - started) / batch * 1e6)
    return median(costs)


def judged_row(
    name: str, rounds: Rounds[T], figures: Callable[[Sequence[T]], dict[str, Figure]]
) -> Row:
    """Build a row of the quiet rounds' figures, or without figures if there were too few."""
    counted: dict[str, Figure] = {"quiet": rounds.counted}
    if not rounds.judged:
        return Row(name, {**counted, "verdict": "not judged"})
    return Row(name, {**figures(rounds.quiet), **counted})


def median(values: Sequence[float]) -> float:
    """Return the middle one of repeated measurements."""
    return statistics.median(values)


def wait_until(done: Callable[[], bool], *, seconds: float, pause: float = 0.02) -> float:
    """Poll until done; return the moment (perf_counter) it was seen. Raises TimeoutError."""
    deadline = time.perf_counter() + seconds
    while not done():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"not done within {seconds:g} seconds")
        time.sleep(pause)
    return time.perf_counter()


def count_bodies(directory: Path, size: int) -> int:
    """Count the bodies of exactly `size` bytes below a directory, databases left out: files, and
    what is packed into segments."""
    found = 0
    for folder, _folders, names in os.walk(directory):
        paths = [Path(folder, name) for name in names if ".sqlite" not in name]
        if Path(folder).name == "segments":
            found += sum(_packed(path.read_bytes(), size) for path in paths)
        else:
            found += sum(path.stat().st_size == size for path in paths)
    return found


def _packed(segment: bytes, size: int) -> int:
    found = place = 0
    while head := _HEAD.match(segment, place):
        place = head.end() + int(head[1])
        found += int(head[1]) == size and place <= len(segment)
    return found


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows as aligned columns."""
    for line in table_lines(rows):
        print(line)


def table_lines(rows: Sequence[Row], width: int = WIDTH) -> list[str]:
    """Format the rows as aligned columns, in lines of at most `width` characters.

    If the columns need more room, the table continues below itself with the names repeated. A name
    that would fill half of the width is cut.
    """
    most = width // 2
    names = [row.name if len(row.name) <= most else f"{row.name[: most - 1]}…" for row in rows]
    first = ["", *names]
    room = max(map(len, first))
    blocks: list[list[list[str]]] = []
    used = width
    for column in dict.fromkeys(column for row in rows for column in row.figures):
        cells = [column, *(_text(row.figures.get(column, "–")) for row in rows)]
        needed = max(map(len, cells))
        if used + 2 + needed > width:
            blocks.append([])
            used = room
        blocks[-1].append([cell.rjust(needed) for cell in cells])
        used += 2 + needed
    lines: list[str] = []
    for block in blocks:
        if lines:
            lines.append("")
        for name, *cells in zip(first, *block, strict=True):
            lines.append("  ".join([name.ljust(room), *cells]).rstrip())
    return lines


def print_wrapped(text: str) -> None:
    """Print a paragraph in lines of at most WIDTH characters."""
    print(textwrap.fill(text, WIDTH))


def print_json(scenario: str, rows: Sequence[Row], facts: Machine) -> None:
    """Print one object for each row, with the machine's facts."""
    for row in rows:
        print(
            json.dumps(
                {"scenario": scenario, "row": row.name, **row.figures, "machine": asdict(facts)}
            )
        )


def _text(figure: Figure) -> str:
    if isinstance(figure, str):
        return figure
    if isinstance(figure, Ratio):
        return f"{figure:.3f}"
    if abs(figure) >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:.2f}" if abs(figure) >= 0.1 else f"{figure:.4f}"


def fresh_work(directory: Path) -> Path:
    """Make a new directory for this invocation. Raises SystemExit if the disk is nearly full."""
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory).free < 4 * 2**30:
        raise SystemExit(f"less than 4 GB free in {directory}: remove what earlier runs left there")
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=directory))
