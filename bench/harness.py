"""What all scenarios share: options, fresh directories, the machine's facts, rows and how they are
printed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sqlite3
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_WORK = ROOT / "build" / "bench"
Figure = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a scenario is to run. `work` is where each measurement gets a directory of its own."""

    work: Path
    repeats: int
    tasks: int
    only: tuple[str, ...] = ()
    speed: float = 1.0
    worked: int = 2_000

    def directory(self, name: str) -> Path:
        """A fresh directory. Nothing is deleted between runs: on a file system without a journal
        creating files gets slow after mass deletes."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.work))

    def wants(self, name: str) -> bool:
        """Whether a row is to be measured."""
        return not self.only or name in self.only


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a scenario's table."""

    name: str
    figures: dict[str, Figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One question: its name, its own default sizes, and what answers it."""

    name: str
    question: str
    run: Callable[[Options], list[Row]]
    tasks: int = 10_000
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures depend on."""

    cpu: str
    cpus: int
    memory_gb: float
    system: str
    python: str
    python_optimised: bool
    """Whether the interpreter was built with profile-guided optimisation (worth 1.3 to 1.6 ×)."""
    sqlite: str
    file_system: str
    file_us: float
    """Microseconds to create, write and close a file of 4 KB, which bounds every body stored."""
    load: float
    """Load average of the minute before the measurement: other work makes figures lower."""


def machine(work: Path) -> Machine:
    """The facts of this machine, now."""
    return Machine(
        cpu=cpu_model(),
        cpus=cpus(),
        memory_gb=memory_gb(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        python_optimised="--enable-optimizations"
        in (sysconfig.get_config_var("CONFIG_ARGS") or ""),
        sqlite=sqlite3.sqlite_version,
        file_system=_file_system(work),
        file_us=round(_file_microseconds(work), 1),
        load=round(os.getloadavg()[0], 2),
    )


def cpu_model() -> str:
    """The name of the processor, as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def memory_gb() -> float:
    """The memory of the machine."""
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _file_system(path: Path) -> str:
    """The type of the file system that holds a directory."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, point, kind, *_rest = line.split()
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _file_microseconds(work: Path) -> float:
    """What one small file costs here and now: the median of some batches."""
    directory = Path(tempfile.mkdtemp(prefix="files-", dir=work))
    body, batch, costs = bytes(4_096), 200, []
    for first in range(0, 10 * batch, batch):
        started = time.perf_counter()
        for number in range(first, first + batch):
            (directory / str(number)).write_bytes(body)
        costs.append((time.perf_counter() - started) / batch * 1e6)
    return median(costs)


def median(values: Sequence[float]) -> float:
    """The middle one of repeated measurements."""
    return statistics.median(values)


def wait_until(done: Callable[[], bool], *, seconds: float, pause: float = 0.02) -> float:
    """Poll until done; the moment (perf_counter) it was seen. Raises TimeoutError."""
    deadline = time.perf_counter() + seconds
    while not done():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"not done within {seconds:g} seconds")
        time.sleep(pause)
    return time.perf_counter()


def count_files(directory: Path, size: int) -> int:
    """How many files of exactly `size` bytes lie below a directory."""
    found = 0
    for folder, _folders, names in os.walk(directory):
        found += sum(os.stat(os.path.join(folder, name)).st_size == size for name in names)
    return found


def print_table(rows: Sequence[Row]) -> None:
    """The rows as aligned columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row.figures))
    lines = [["", *columns]]
    lines += [
        [row.name, *(_text(row.figures.get(column, "–")) for column in columns)] for row in rows
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]))


def print_json(scenario: str, rows: Sequence[Row], facts: Machine) -> None:
    """One object a row, with the machine's facts."""
    for row in rows:
        print(
            json.dumps(
                {"scenario": scenario, "row": row.name, **row.figures, "machine": asdict(facts)}
            )
        )


def _text(figure: Figure) -> str:
    if isinstance(figure, str):
        return figure
    if abs(figure) >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:.2f}" if abs(figure) >= 0.1 else f"{figure:.4f}"


def fresh_work(directory: Path) -> Path:
    """A new directory for this invocation. Raises SystemExit where the disk is nearly full."""
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory).free < 4 * 2**30:
        raise SystemExit(f"less than 4 GB free in {directory}: remove what earlier runs left there")
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=directory))
