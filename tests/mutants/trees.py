"""Copies of the source tree that trials change: the working tree is never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
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


class Tree:
    """One copy of the tree, with the environments of the working tree."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        shutil.copytree(ROOT, directory, ignore=_LEFT_OUT, symlinks=True)
        for name in _ENVIRONMENTS:
            (directory / name).symlink_to(ROOT / name)
        self._stamps = count(1_000_000_000)

    def write(self, path: str, text: str) -> None:
        """Write a source file. Its time is unlike any before, so that no compiled form of an
        earlier text of the same length is taken for it."""
        target = self.root / path
        target.write_text(text, encoding="utf-8")
        stamp = next(self._stamps)
        os.utime(target, (stamp, stamp))

    def pytest(self, arguments: Sequence[str], *, seconds: float) -> tuple[int | None, str]:
        """Run pytest over the copy; its exit code, None where it took too long, and its output."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "--hypothesis-seed=0", *arguments],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end_group(process)
            return None, ""
        except BaseException:
            _end_group(process)
            raise
        _end_group(process)
        return process.returncode, output


def _end_group(process: subprocess.Popen[str]) -> None:
    """End the process and the programs that its tests have left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.communicate()
