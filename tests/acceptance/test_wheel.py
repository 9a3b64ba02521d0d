"""The wheel, in an environment that has nothing else: a server, a client and their files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.disk import files_below
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
INSTALL_SECONDS = 900
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )


@pytest.fixture
def _index(tmp_path: Path) -> None:
    """Skip where no package index answers: any later failure is one of the wheel."""
    asked = run(*PIP, "download", "--no-deps", "--no-cache-dir", "-d", tmp_path / "asked", "click")
    if asked.returncode != 0:
        why = (asked.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        pytest.skip(f"installing a wheel needs a package index, and none answers: {why}")


@pytest.mark.timeout(2 * INSTALL_SECONDS)
@pytest.mark.usefixtures("_index")
def test_the_wheel_serves_in_an_empty_environment(tmp_path: Path) -> None:
    built = run("scripts/wheel", tmp_path / "dist")
    assert built.returncode == 0, built.stderr
    wheel = Path(built.stdout.strip())
    assert wheel.parent == tmp_path / "dist"

    sources = [path for path in files_below(ROOT / "conveyor") if not path.name.startswith(".")]
    assert held_by(wheel) == {
        str(path.relative_to(ROOT)) for path in sources if "__pycache__" not in path.parts
    }

    empty = tmp_path / "empty"
    assert run(sys.executable, "-m", "venv", empty).returncode == 0
    constraints = ("--constraint", ROOT / "constraints.lock")
    installed = run(empty / "bin" / "pip", "install", *constraints, wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr

    conveyor = str(empty / "bin" / "conveyor")
    serving = [conveyor, "dev", "--gateway", "fake", "--json", "--port", "0", "--data-dir", "data"]
    with subprocess.Popen(serving, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            api = ("--server", json.loads(server.stdout.readline())["api"])
            page = "http://fake.test/page"
            ran = run(conveyor, "submit", page, "--out", "pages", *api, cwd=tmp_path)
            listed = run(conveyor, "jobs", "--json", *api, cwd=tmp_path)
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(SECONDS) == 0
    assert ran.returncode == 0, ran.stderr
    assert json.loads(listed.stdout)["job_id"] == ran.stdout.strip()
    assert list((tmp_path / "pages").glob("*.html"))


def held_by(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("conveyor/")}
