"""Samples the stack of the thread that holds the interpreter, 200 times a second from outside, by
py-spy.

Threads take turns at the interpreter, so its time is the limit of a process. A tracing profiler
(cProfile, yappi) makes the many small calls of a serialiser dearer than they are, and a thread that
samples the others from within runs only where one of them gives way, which is at a socket. py-spy
reads the stacks from the memory of the process without stopping it: stopping some sixty threads for
each sample doubled the cost of a task. A stack that changed meanwhile is thrown away.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.harness import ROOT
from bench.servers import MissingProgram

RATE = 200
"""Samples a second."""
_PR_SET_PTRACER = 0x59616D61
_ROOTS = frozenset({"Thread._bootstrap", "<module>", "_run_module_as_main"})
_TOTALS = re.compile(r"Samples: (\d+) Errors: (\d+)")
_FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)")


class Frame(NamedTuple):
    """A function and its file."""

    file: str
    function: str


class Sample(NamedTuple):
    """A stack, outermost first, and the number of times it was seen."""

    stack: tuple[Frame, ...]
    times: int


class Cost(NamedTuple):
    """A name for the time spent in certain functions. `inside` is a part of the path of their file,
    a blank and their name."""

    inside: str
    name: str


def let_be_sampled() -> None:
    """Let other processes of this user read this one's memory, where Linux keeps that to root."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


@contextmanager
def sampled(pid: int, path: Path) -> Iterator[None]:
    """Sample a process into a file while the body runs. Raises MissingProgram, RuntimeError."""
    command = [find_py_spy(), "record", "--pid", str(pid), "--rate", str(RATE), "--gil"]
    command += ["--nonblocking", "--format", "raw", "--full-filenames", "--output", str(path)]
    log = log_of(path)
    with log.open("wb") as output:
        sampler = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        sampler.send_signal(signal.SIGINT)
        sampler.wait()
    if not path.exists():
        raise RuntimeError(f"py-spy took no samples: {log.read_text(errors='replace')[-500:]}")


def log_of(path: Path) -> Path:
    """Return py-spy's log about a file of samples."""
    return path.with_suffix(".log")


def find_py_spy() -> str:
    """Return the path of py-spy. Raises MissingProgram."""
    found = shutil.which("py-spy", path=str(ROOT / ".venv-profile" / "bin")) or shutil.which(
        "py-spy"
    )
    if found is None:
        raise MissingProgram("the profile needs py-spy, which scripts/bench aws_calls installs")
    return found


def read_samples(text: str) -> list[Sample]:
    """Read the samples in a file of py-spy's format `raw`, without torn ones, which do not begin
    where a thread begins."""
    samples = []
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        found = [_FRAME.fullmatch(part) for part in stack.split(";")]
        frames = tuple(Frame(match[2], match[1]) for match in found if match is not None)
        if frames and frames[0].function in _ROOTS:
            samples.append(Sample(frames, int(count)))
    return samples


def seconds_sampled(log: str) -> float:
    """Return the seconds in which a thread had the interpreter, by py-spy's last lines, which also
    count stacks that it could not read. Raises ValueError if they are missing."""
    totals = _TOTALS.search(log)
    if totals is None:
        raise ValueError(f"py-spy did not say how much it saw: {log[-500:]}")
    return (int(totals[1]) + int(totals[2])) / RATE


def cost_of(stack: Sequence[Frame], costs: Sequence[Cost], *, other: str) -> str:
    """Return the name of the innermost frame that has one: a library's cost is its caller's."""
    for frame in reversed(stack):
        for cost in costs:
            if cost.inside in f"{frame.file} {frame.function}":
                return cost.name
    return other


def by_name(named: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Add up counts by name, the greatest first."""
    total: Counter[str] = Counter()
    for name, count in named:
        total[name] += count
    return total.most_common()
