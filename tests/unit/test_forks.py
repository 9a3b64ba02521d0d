"""The plugin that collects once and forks: its report is that of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extended]

SHARED = """
import os
import pytest

@pytest.fixture(scope="session", autouse=True)
def ended():
    yield
    with open(os.environ["ENDED"], "a") as file:
        print(os.getpid(), "ended", file=file)
"""
MODULE = """
import os
import pytest

@pytest.fixture
def broken():
    raise LookupError("no such thing")

@pytest.fixture
def breaks():
    yield
    raise LookupError("not put back")

def note(name):
    with open(os.environ["ENDED"], "a") as file:
        print(os.getpid(), name, file=file)

def test_right(tmp_path):
    note(__name__)
    assert not list(tmp_path.parent.glob("of-*"))
    (tmp_path / f"of-{__name__}").touch()
    print("said by one that passed")

def test_wrong(capsys):
    note(__name__)
    print(f"said in {__name__}")
    assert 1 == 2

def test_skipped():
    pytest.skip("not here")

@pytest.mark.xfail(strict=True)
def test_known():
    assert 1 == 2

def test_not_set_up(broken): ...

def test_not_put_back(breaks): ...
"""
COUNTED = "{0} failed, {1} passed, {0} skipped, {0} xfailed, {1} errors"


def ran(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a directory, with no settings but these."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(directory)]
    plugins = ["-p", "tests.forks", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    environment = {"ENDED": str(directory / "ended"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, *plugins, "-q", *options, str(directory)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def modules(directory: Path, count: int, text: str = MODULE) -> None:
    """Write so many modules of the same tests."""
    (directory / "conftest.py").write_text(SHARED)
    for number in range(count):
        (directory / f"test_{number}.py").write_text(text)


def counted(output: str) -> str:
    """Return the counts in the last line of a report."""
    return output.rstrip().rpartition("\n")[2].rpartition(" in ")[0]


def test_what_became_of_each_test_is_told_as_by_one_process(tmp_path: Path) -> None:
    modules(tmp_path, 4)
    alone, beside = ran(tmp_path), ran(tmp_path, "--forks", "2")
    assert alone.returncode == beside.returncode == 1, beside.stderr
    assert counted(alone.stdout) == counted(beside.stdout) == COUNTED.format(4, 8)
    for number in range(4):
        # What a test that failed has printed is told once, and of none that passed.
        assert beside.stdout.count(f"said in test_{number}\n") == 1
    assert "said by one that passed" not in beside.stdout
    assert "LookupError: not put back" in beside.stdout


def test_a_module_stays_together_and_fixtures_end_with_their_process(tmp_path: Path) -> None:
    modules(tmp_path, 6)
    ran(tmp_path, "--forks", "3")
    notes = [line.split() for line in (tmp_path / "ended").read_text().splitlines()]
    homes = {name: {pid for pid, told in notes if told == name} for _, name in notes}
    ended = homes.pop("ended")
    assert len(homes) == 6
    assert all(len(pids) == 1 for pids in homes.values())
    assert sorted(pid for pid, name in notes if name == "ended") == sorted(ended)
    assert ended == set().union(*homes.values())


def test_a_process_that_ends_is_missed(tmp_path: Path) -> None:
    gone = (
        "import os\ndef test_before(): ...\ndef test_gone(): os._exit(0)\ndef test_after(): ...\n"
    )
    modules(tmp_path, 1, gone)
    (tmp_path / "test_other.py").write_text("def test_other(): ...\n")
    done = ran(tmp_path, "--forks", "2")
    assert done.returncode == 1
    assert "its process ended in the middle of it" in done.stdout
    assert "test_0.py::test_gone\n" in done.stdout
    assert counted(done.stdout) == "1 failed, 2 passed"


def test_nothing_is_said_but_by_the_process_that_reports(tmp_path: Path) -> None:
    chatty = """
import os
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    os.write(2, b"between two tests")
    return (yield)
"""
    modules(tmp_path, 2, "def test_right(): ...\n")
    (tmp_path / "conftest.py").write_text(chatty)
    done = ran(tmp_path, "--forks", "2")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_that_breaks_says_why(tmp_path: Path) -> None:
    broken = """
def pytest_runtest_setup(item):
    if "gone" in item.name:
        raise SystemExit("a hook that ends the process")
"""
    modules(tmp_path, 1, "def test_gone(): ...\n")
    (tmp_path / "conftest.py").write_text(broken)
    done = ran(tmp_path, "--forks", "2")
    assert done.returncode == 1
    assert "a hook that ends the process" in done.stderr + done.stdout


def test_the_first_failure_ends_it_where_that_is_asked_for(tmp_path: Path) -> None:
    modules(tmp_path, 1, "def test_wrong(): assert 1 == 2\n")
    for number in range(40):
        (tmp_path / f"test_later_{number}.py").write_text(
            "import time\ndef test_slow(): time.sleep(0.2)\n"
        )
    done = ran(tmp_path, "--forks", "2", "-x")
    assert done.returncode == 1
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is None or int(passed[1]) < 40
    assert "stopping after 1 failures" in done.stdout


def test_nothing_runs_where_a_module_cannot_be_read(tmp_path: Path) -> None:
    modules(tmp_path, 2)
    (tmp_path / "test_unreadable.py").write_text("import nothing_of_that_name\n")
    done = ran(tmp_path, "--forks", "2")
    assert done.returncode == 2
    assert not (tmp_path / "ended").exists()


def test_one_process_is_no_other_way(tmp_path: Path) -> None:
    modules(tmp_path, 1)
    assert counted(ran(tmp_path, "--forks", "1").stdout) == COUNTED.format(1, 2)
