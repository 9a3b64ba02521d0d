"""Child processes of a benchmark: starts them, stops them by pid, and reads their use from
/proc."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far, and peak resident bytes, of a process and all its descendants."""

    cpu_seconds: float
    peak_rss: int


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the command name; None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def tree(root: int) -> list[int]:
    """Return a process and all its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return user and system time of the processes and of the children that they have reaped."""
    ticks = 0
    for pid in pids:
        if (fields := _stat(pid)) is not None:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / CLOCK_TICKS


def counts_threads() -> bool:
    """Return whether the kernel counts the CPU of each thread in nanoseconds."""
    return Path("/proc/self/schedstat").exists()


def thread_seconds(pid: int) -> dict[int, float]:
    """Return the CPU seconds so far of each living thread of a process, by the thread's number.

    /proc/PID/task/TID/schedstat counts nanoseconds, where stat counts ticks.
    """
    seconds = {}
    for entry in os.scandir(f"/proc/{pid}/task"):
        try:
            text = Path(entry.path, "schedstat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        seconds[int(entry.name)] = int(text.split()[0]) / 1e9
    return seconds


def used_between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the CPU seconds that threads used between two readings of `thread_seconds`.

    Of a thread that ended meanwhile the last moments are not known, and not counted.
    """
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def memory(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status in bytes: VmHWM is the peak, VmRSS the present resident
    size."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def usage(root: int) -> Usage:
    """Return the use of a process and its descendants so far."""
    pids = tree(root)
    return Usage(cpu_seconds(pids), sum(memory(pid, "VmHWM") for pid in pids))


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it ended since it was found
            os.kill(pid, number)


class Child:
    """One child process; its output goes to a file, unless `stdout` says otherwise."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                env=dict(os.environ, **(environment or {})),
            )

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    def usage(self) -> Usage:
        """Return the use of it and its descendants so far."""
        return usage(self.pid)

    def freeze(self) -> None:
        """Stop it and its descendants with SIGSTOP."""
        _signal(tree(self.pid), signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue it and its descendants."""
        _signal(tree(self.pid)[::-1], signal.SIGCONT)

    def stop(self) -> None:
        """End it and its descendants: SIGTERM, and SIGKILL for those left after a while."""
        if self.process.poll() is not None:
            return
        pids = tree(self.pid)
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _signal(pids, signal.SIGKILL)
            self.process.wait()
