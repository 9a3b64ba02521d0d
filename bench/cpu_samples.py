"""Samples stacks from outside, by py-spy: of the thread that holds the interpreter, 200 times a
second, or of every thread that has a CPU, 97 times a second.

Threads take turns at the interpreter, so its time is the limit of a process. A tracing profiler
(cProfile, yappi) makes the many small calls of a serialiser dearer than they are, and a thread that
samples the others from within runs only where one of them gives way, which is at a socket. Of the
holder py-spy reads the stack from the process's memory without stopping it: stopping some sixty
threads for each sample doubled the cost of a task. A stack that changed meanwhile is thrown away.
Where every thread counts it stops them, since most stacks of a busy loop would have changed and
those in system calls would not; with the few threads of conveyor-dev a task costs no more for it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.harness import ROOT
from bench.servers import MissingProgram

RATE = 200
"""Samples a second of the thread that holds the interpreter."""
THREADS_RATE = 97
"""Samples a second of every thread; no divisor of what a program does by the clock."""
START_SECONDS = 10.0
_PR_SET_PTRACER = 0x59616D61
_ROOTS = frozenset({"Thread._bootstrap", "<module>", "_run_module_as_main"})
_TOTALS = re.compile(r"Samples: (\d+) Errors: (\d+)")
_THREAD = re.compile(r"thread \((\d+)\)(?:: .*)?")
_FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)")


class Frame(NamedTuple):
    """A function and its file."""

    file: str
    function: str


class Sample(NamedTuple):
    """A stack, outermost first, and the number of times it was seen; if every thread was sampled,
    also its thread's number, as the system has it."""

    stack: tuple[Frame, ...]
    times: int
    thread: int = 0


class Cost(NamedTuple):
    """A name for the time spent in certain functions. `inside` is a part of the path of their file,
    a blank and their name."""

    inside: str
    name: str


LET_BE_SAMPLED = (
    f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PTRACER}, ctypes.c_ulong(-1), 0, 0, 0)"
)
"""The lines by which a Python program on Linux does the same, without this package."""


def let_be_sampled() -> None:
    """Let other processes of this user read this one's memory, where Linux keeps that to root."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


@contextmanager
def sampled(pid: int, path: Path, *, threads: bool = False) -> Iterator[None]:
    """Sample a process into a file while the body runs: the thread that holds the interpreter, or
    all `threads` that run. Raises MissingProgram, RuntimeError."""
    command = [find_py_spy(), "record", "--pid", str(pid)]
    if threads:
        command += ["--threads", "--rate", str(THREADS_RATE)]
    else:
        command += ["--gil", "--nonblocking", "--rate", str(RATE)]
    command += ["--format", "raw", "--full-filenames", "--output", str(path)]
    log = log_of(path)
    with log.open("wb") as output:
        sampler = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _await_start(sampler, log)
        yield
    finally:
        sampler.send_signal(signal.SIGINT)
        sampler.wait()
    if not path.exists():
        raise RuntimeError(f"py-spy took no samples: {log.read_text(errors='replace')[-500:]}")


def _await_start(sampler: subprocess.Popen[bytes], log: Path) -> None:
    """Return once py-spy says that it samples, or has ended, or after a while."""
    deadline = time.monotonic() + START_SECONDS
    while sampler.poll() is None and b"Sampling" not in log.read_bytes():
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def log_of(path: Path) -> Path:
    """Return py-spy's log about a file of samples."""
    return path.with_suffix(".log")


def find_py_spy() -> str:
    """Return the path of py-spy. Raises MissingProgram."""
    found = shutil.which("py-spy", path=str(ROOT / ".venv-profile" / "bin")) or shutil.which(
        "py-spy"
    )
    if found is None:
        raise MissingProgram("the profile needs py-spy, which scripts/bench makes in .venv-profile")
    return found


def read_samples(text: str) -> list[Sample]:
    """Read the samples in a file of py-spy's format `raw`, without torn ones, which do not begin
    where a thread begins."""
    samples = []
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        first, *rest = stack.split(";")
        thread = _THREAD.fullmatch(first)
        found = [_FRAME.fullmatch(part) for part in (rest if thread else [first, *rest])]
        frames = tuple(Frame(match[2], match[1]) for match in found if match is not None)
        if frames and frames[0].function in _ROOTS:
            samples.append(Sample(frames, int(count), int(thread[1]) if thread else 0))
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
