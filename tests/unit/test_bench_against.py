"""The comparison with another commit: its checkout, how its server starts, and the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.against import Code, NoSuchCommit, checkout, commit_of, heading, row_of
from bench.command import SCENARIOS, WIDTH
from bench.harness import table_lines
from bench.rounds import DISTURBED, QUIET, Half, Pair, Round, Rounds

PROJECT = '[project]\nname = "x"\n[project.scripts]\nconveyor-dev = "conveyor.start:main"\n'


def git(root: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    result = subprocess.run(
        ["git", "-C", str(root), *settings, *arguments], check=True, capture_output=True, text=True
    )
    return result.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two commits, with a file that belongs to neither."""
    root = tmp_path / "repository"
    package = root / "conveyor"
    package.mkdir(parents=True)
    git(root, "init", "--quiet")
    (root / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("")
    (package / "start.py").write_text("def main():\n    print('old')\n    return 3\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "old")
    (package / "start.py").write_text("def main():\n    print('new')\n")
    git(root, "commit", "--quiet", "--all", "--message", "new")
    (package / "stray.py").write_text("")
    return root


def test_a_checkout_has_the_files_of_the_commit_and_goes_afterwards(repository: Path) -> None:
    with checkout("HEAD~1", repository) as code:
        started = subprocess.run(
            code.command, env=code.environment, capture_output=True, text=True, cwd=repository
        )
        code.verify()
        assert not (code.root / "conveyor" / "stray.py").exists()
        assert code.label == git(repository, "rev-parse", "HEAD~1")[:7]

    assert (started.returncode, started.stdout) == (3, "old\n")
    assert not code.root.exists()
    assert git(repository, "worktree", "list").count("\n") == 0


def test_a_version_that_is_not_imported_from_its_directory_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "conveyor").mkdir()
    empty = Code("empty", tmp_path / "elsewhere")

    with pytest.raises((RuntimeError, subprocess.CalledProcessError)):
        empty.verify()


@pytest.mark.parametrize("revision", ["nothing", "--all", "", "HEAD~99", "HEAD:pyproject.toml"])
def test_what_is_no_commit_is_told(repository: Path, revision: str) -> None:
    with pytest.raises(NoSuchCommit, match="there is no commit"):
        commit_of(revision, repository)


def test_both_versions_run_in_this_environment(repository: Path) -> None:
    assert Code("this", repository).command[0] == sys.executable


def pair(ratio: float, kind: str = QUIET) -> Round[Pair]:
    halves = Pair(Half(1_000, 123.4567, 200.0), Half(1_000, 123.4567 * ratio, 200.0))
    return Round(halves, kind, 0.0, 400.0)


def test_the_table_fits_at_its_widest() -> None:
    pairs = Rounds([pair(ratio) for ratio in (10.0, 12.0, 11.0, 10.5, 99.0)], 5)
    names = [row for entry in SCENARIOS.values() if "against" in entry.extra for row in entry.rows]
    lines = table_lines([row_of(name, "0123456", pairs) for name in names])

    assert max(map(len, lines)) <= WIDTH
    assert lines.count("") == 1
    assert len(heading("results_page", "0123456").split()) < 80


def test_a_row_of_too_few_quiet_pairs_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = Rounds([*[pair(0.9)] * 4, *[pair(0.9, DISTURBED)] * 11], 5)
    few = Rounds([pair(0.9)] * 2, 2)

    assert row_of("row", "0123456", noisy).figures == {
        "quiet": "4 of 15",
        "verdict": "not judged",
    }
    assert row_of("row", "0123456", few).figures["verdict"] == "not judged"
    assert capsys.readouterr().err.splitlines() == [
        "row: not judged, 4 of 15 rounds were quiet and 5 were wanted",
        "row: not judged, fewer than 5 pairs",
    ]


def test_a_judged_row_has_costs_ratios_and_a_verdict() -> None:
    made = row_of("row", "0123456", Rounds([pair(0.9)] * 5, 5))

    assert made.figures["0123456 µs"] == pytest.approx(123_456.7)
    assert made.figures["medians"] == pytest.approx(0.9)
    assert made.figures["verdict"] == "costs less"
    assert made.figures["rate ×"] == pytest.approx(1.0)
