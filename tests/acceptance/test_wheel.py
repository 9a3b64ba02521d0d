"""The wheel, in an environment that has nothing else: a server, a client and their files; and the
pipelines of scripts/samples, whose commands install it and run tests with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance import support_wheelhouse
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; skip where no package index answers: any later failure is one of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    asked = run(*PIP, "download", "--no-deps", "--no-cache-dir", "-d", folder / "asked", "click")
    if asked.returncode != 0:
        why = (asked.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        pytest.skip(f"building a wheel needs a package index, and none answers: {why}")
    built = run("scripts/wheel", folder / "dist")
    assert built.returncode == 0, built.stderr
    made = Path(built.stdout.strip())
    assert made.parent == folder / "dist"
    return made


@pytest.mark.timeout(2 * INSTALL_SECONDS)
def test_the_wheel_serves_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
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


SAMPLES = ROOT / "scripts" / "samples"
TESTED = """
import pytest

pytestmark = pytest.mark.conveyor(clock="manual")


def test_a_page_is_read(jobs, server):
    job = jobs.submit(server.url("page", flaky=1))
    server.drain()
    assert jobs.run(job)["stats"]["successful"] == 1
"""


def github() -> list[tuple[str, str]]:
    """The commands of the steps of GitHub's pipeline, and the shell that runs each."""
    pipeline = yaml.safe_load((SAMPLES / "github.yml").read_text())
    # A bare `on` is what YAML 1.1 calls true.
    assert pipeline[True] == ["push", "pull_request"]
    [job] = pipeline["jobs"].values()
    assert [step for step in job["steps"] if ("run" in step) == ("uses" in step)] == []
    return [("bash -e", step["run"]) for step in job["steps"] if "run" in step]


def gitlab() -> list[tuple[str, str]]:
    """The scripts of the jobs of GitLab's pipeline, each after what stands before all, and the
    shell that runs them."""
    pipeline: dict[str, Any] = yaml.safe_load((SAMPLES / "gitlab.yml").read_text())
    before = pipeline.pop("default")["before_script"]
    assert list(pipeline) == ["tests", "program"]
    scripts = ["\n".join([*before, *job["script"]]) for job in pipeline.values()]
    return [("sh -e", script) for script in scripts]


@pytest.mark.timeout(2 * INSTALL_SECONDS)
@pytest.mark.parametrize("pipeline", [github, pytest.param(gitlab, marks=pytest.mark.full)])
def test_a_pipeline_runs_in_an_empty_environment(
    wheel: Path, tmp_path: Path, pipeline: Callable[[], list[tuple[str, str]]]
) -> None:
    house, where, empty = tmp_path / "house", tmp_path / "checkout", tmp_path / "python"
    support_wheelhouse.fill(house, "conveyor-batch", "pytest")
    for folder in ("wheels", "tests"):
        (where / folder).mkdir(parents=True)
    shutil.copy(wheel, where / "wheels")
    shutil.copy(SAMPLES / "conftest.py", where / "tests")
    (where / "tests" / "test_app.py").write_text(TESTED)
    assert run(sys.executable, "-m", "venv", empty).returncode == 0
    for shell, script in pipeline():
        _run_alone(script, shell, where, empty, house)
    assert 'tests="1"' in (where / "report.xml").read_text()
    assert len(list((where / "pages").glob("[0-9A-Z]*.html"))) == 2


def _run_alone(script: str, shell: str, where: Path, python: Path, house: Path) -> None:
    """Run a script where nothing else is known; packages come from a directory alone."""
    home = where.with_suffix(".home")
    home.mkdir(exist_ok=True)
    ran = subprocess.run(
        [*shell.split(), "-c", script],
        cwd=where,
        env={
            "PATH": f"{python / 'bin'}{os.pathsep}{os.defpath}",
            "HOME": str(home),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(house),
            "PIP_NO_COMPILE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, (script, ran.stdout, ran.stderr)
