"""Compares this code with that of another commit: CPU for each operation, pair by pair.

Both versions run in the same environment. Each is driven from outside, over the API of its own
conveyor-dev: module names in the other commit do not matter, and that commit need not have
benchmarks. A scenario offers for each version a function for each row; one call of it measures half
a pair.
"""

from __future__ import annotations

import compileall
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.command import SCENARIOS
from bench.harness import ROOT, Figure, Options, Ratio, Row
from bench.rounds import LEAST_PAIRS, Half, Pair, Rounds, compare, take_pairs, why_not

SHORT = 7
"""Digits of a commit's name in a table."""


class NoSuchCommit(Exception):
    """The commit to compare with is not available; the text says why."""


@dataclass(frozen=True, slots=True)
class Code:
    """A version of Conveyor: its name in tables, and the directory with its package."""

    label: str
    root: Path

    @property
    def command(self) -> list[str]:
        """Return the command that starts its conveyor-dev, whatever this environment has
        installed."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]
        module, _, function = project["scripts"]["conveyor-dev"].partition(":")
        start = f"import sys, {module} as program; sys.exit(program.{function}())"
        return [sys.executable, "-P", "-c", start]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that makes Python import this version and no other."""
        return {"PYTHONPATH": str(self.root)}

    def verify(self) -> None:
        """Compile its modules, and make sure that Python imports them from here.

        So neither version compiles anything while it is measured. Raises RuntimeError.
        """
        compileall.compile_dir(self.root / "conveyor", quiet=2)
        result = subprocess.run(
            [sys.executable, "-P", "-c", "import conveyor; print(conveyor.__file__)"],
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        )
        if not Path(result.stdout.strip()).resolve().is_relative_to(self.root.resolve()):
            raise RuntimeError(f"{self.label} is not imported from its own directory")


Halves = Mapping[str, Callable[[], Half]]
"""Functions that measure half a pair, by the name of the row."""
Against = Callable[[Code, Options], Halves]
"""Prepares one version."""


def commit_of(revision: str, root: Path = ROOT) -> str:
    """Return the full name of a commit. Raises NoSuchCommit."""
    result = _git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
    )
    if result.returncode:
        raise NoSuchCommit(f"there is no commit {revision} in this repository")
    return result.stdout.decode().strip()


@contextmanager
def checkout(revision: str, root: Path = ROOT) -> Iterator[Code]:
    """Put the files of a commit into a temporary directory. Raises NoSuchCommit."""
    commit = commit_of(revision, root)
    packed = _git(root, "archive", "--format=tar", commit)
    if packed.returncode:
        raise NoSuchCommit(packed.stderr.decode(errors="replace").strip())
    with tempfile.TemporaryDirectory(prefix="conveyor-against-") as directory:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
            # The filter came with a patch of Python 3.11; the archive is of this repository.
            if hasattr(tarfile, "data_filter"):
                files.extractall(directory, filter="data")
            else:
                files.extractall(directory)
        yield Code(commit[:SHORT], Path(directory))


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True)
    except FileNotFoundError as error:
        raise NoSuchCommit("git is needed for a comparison, and is not on PATH") from error


def run_against(name: str, against: Against, revision: str, options: Options) -> list[Row]:
    """Measure both versions in turn, for each row of a scenario. Raises NoSuchCommit."""
    with checkout(revision) as base_code:
        this_code = Code("this", ROOT)
        base_code.verify()
        this_code.verify()
        base = against(base_code, options)
        this = against(this_code, options)
        rows = []
        for row in base:
            pairs = take_pairs(base[row], this[row], wanted=options.repeats, label=f"{name}, {row}")
            rows.append(row_of(row, base_code.label, pairs))
    return rows


def row_of(name: str, base: str, pairs: Rounds[Pair]) -> Row:
    """Build a row of the table: the costs and ratios of the quiet pairs, or "not judged"."""
    found = compare(pairs)
    if found is None:
        if pairs.judged:
            reason = f"fewer than {LEAST_PAIRS} pairs"
        else:
            reason = why_not(pairs).partition(",")[0]
        print(f"{name}: not judged, {reason}", file=sys.stderr)
        return Row(name, {"quiet": pairs.counted, "verdict": "not judged"})
    figures: dict[str, Figure] = {
        f"{base} µs": round(found.base_cost, 1),
        "this µs": round(found.this_cost, 1),
        "medians": Ratio(found.ratio_of_medians),
        "pairs": Ratio(found.median_ratio),
        "least": Ratio(found.least),
        "most": Ratio(found.most),
        "quiet": pairs.counted,
        "verdict": found.verdict,
        "rate ×": Ratio(found.speed),
        "rate least": Ratio(found.least_speed),
        "rate most": Ratio(found.most_speed),
    }
    return Row(name, figures)


def heading(name: str, base: str) -> str:
    """Return the heading of the table."""
    return (
        f"{SCENARIOS[name].question} Microseconds of CPU for each operation, of {base} and of this "
        "code, and how many times as much this code uses: by the medians, the median of all pairs, "
        "the least and the most of a pair. Quiet pairs alone count; the verdict needs all of them "
        "on one side of 1. Below that, how many times as many operations a second it made."
    )
