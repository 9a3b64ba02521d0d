"""Copies of the source tree that trials change: the working tree is never touched.

Tests run in forks of a process that has imported the libraries already, which is most of the work
of starting them. Conveyor and its tests are imported anew by each, from its copy.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from tests.architecture.source import ROOT

_LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv*",
    ".mutants",
    ".conveyor",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "*.egg-info",
)
_ENVIRONMENTS = (".venv", ".venv-emulators")
_LIBRARIES = [
    "__main__",
    "_hypothesis_pytestplugin",
    "aiosqlite",
    "anyio.pytest_plugin",
    "click",
    "cryptography.hazmat.primitives.ciphers.aead",
    "httpx",
    "hypothesis",
    "jsonschema_rs",
    "msgspec",
    "prometheus_client",
    "pytest",
    "pytest_benchmark.plugin",
    "pytest_timeout",
    "schemathesis.pytest.plugin",
    "starlette.applications",
    "trio",
    "uvloop",
    "xdist.plugin",
    "zenrows.batch.models",
]
_IMPORTED_BEFORE = "ignore:Module already imported so cannot be rewritten"
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(_LIBRARIES)


class Tree:
    """One copy of the tree, with the environments of the working tree."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        shutil.copytree(ROOT, directory, ignore=_LEFT_OUT, symlinks=True)
        for name in _ENVIRONMENTS:
            (directory / name).symlink_to(ROOT / name)
        self._stamps = count(1_000_000_000)
        self._running: int | None = None

    def write(self, path: str, text: str) -> None:
        """Write a source file. Its time is unlike any before, so that no compiled form of an
        earlier text of the same length is taken for it."""
        target = self.root / path
        target.write_text(text, encoding="utf-8")
        stamp = next(self._stamps)
        os.utime(target, (stamp, stamp))

    def pytest(self, arguments: Sequence[str], *, seconds: float) -> tuple[int | None, str]:
        """Run pytest over the copy; its exit code, None where it took too long, and its output."""
        output = self.root.with_suffix(".output")
        options = ["-q", "--hypothesis-seed=0", "-W", _IMPORTED_BEFORE, *arguments]
        process = _PROCESSES.Process(target=_run, args=(str(self.root), str(output), options))
        process.start()
        self._running = process.pid
        try:
            process.join(seconds)
            code = process.exitcode
        finally:
            self.end()
            process.join()
            process.close()
        return code, output.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """End the run that is under way, and the programs that its tests have left."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(running, signal.SIGKILL)


def _run(root: str, output: str, options: list[str]) -> None:
    """Become a process that has imported libraries alone, and run pytest."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.chdir(root)
    os.environ["PYTHONPATH"] = root
    sys.path[:] = [root, *(path for path in sys.path if Path(path or root) != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("conveyor", "tests")]:
        del sys.modules[name]
    import pytest

    code = pytest.main(options)
    sys.stdout.flush()
    # Threads that a test left, or that its mutant keeps busy, must not hold the process up.
    os._exit(int(code))
