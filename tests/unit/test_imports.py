"""The modules that a program loads, and those it does not: seen from a process of its own."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import conveyor

CLOUD = {"boto3", "botocore", "redis"}
HEAVY = {
    "aiohttp",
    "aiosqlite",
    "anyio",
    "asyncio",
    "cryptography",
    "httpx",
    "msgspec",
    "prometheus_client",
    "pydantic_core",
    "rich",
    "sqlite3",
    "starlette",
    "uvicorn",
}

SERVE_ONCE = """
import anyio

from conveyor.roles.dev import serve
from conveyor.settings import load


async def main():
    stop = anyio.Event()
    settings = load({}, port=0, data_dir=sys.argv[1], gateway="fake", log_level="error")
    await serve(settings, on_ready=lambda _info: stop.set(), stop=stop)


anyio.run(main)
"""

SHOW_HELP = """
import io
from contextlib import redirect_stdout

from conveyor.cli import main

shown = io.StringIO()
try:
    with redirect_stdout(shown):
        main(["--help"])
except SystemExit as ended:
    assert not ended.code, ended.code
assert "Usage: conveyor" in shown.getvalue()
"""

REPORT = """
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(program: str, *arguments: str) -> set[str]:
    """The modules that a fresh interpreter holds after a program has run in it."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{program}\n{REPORT}", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.slow
def test_a_development_server_loads_no_cloud_client(tmp_path: Path) -> None:
    loaded = loaded_by(SERVE_ONCE, str(tmp_path / "data"))

    assert "conveyor.dev" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in CLOUD}
    # Each takes a tenth of a second to load, and the fake gateway calls nobody.
    assert not {"stream_zip", "pyarrow", "aiohttp"} & loaded
    assert not {name for name in loaded if name.startswith("conveyor.prod")}


@pytest.mark.slow
def test_importing_the_development_role_loads_no_cloud_client() -> None:
    loaded = loaded_by("import conveyor.roles.dev")

    assert "conveyor.roles.dev" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in CLOUD}


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_by(SHOW_HELP)

    assert "conveyor.cli" in loaded
    assert not HEAVY & loaded


@pytest.mark.slow
def test_no_program_loads_what_is_made_for_tests(tmp_path: Path) -> None:
    loaded = loaded_by(SERVE_ONCE, str(tmp_path / "data"))

    assert not {name for name in loaded if name.startswith("conveyor.testing")}


@pytest.mark.parametrize("module", ["conveyor.__main__", "conveyor.cli"])
def test_an_older_python_is_told_in_one_line(module: str) -> None:
    program = (
        "import sys; sys.version_info = (3, 10, 4, 'final', 0); sys.version = '3.10.4 (main)'; "
        f"import {module}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "conveyor: needs Python 3.11 or later, and this is 3.10.4\n"


@pytest.mark.parametrize("file", ["__init__.py", "__main__.py", "cli/__init__.py"])
def test_an_older_python_can_read_what_tells_it(file: str) -> None:
    text = (Path(conveyor.__file__).parent / file).read_text("utf-8")
    ast.parse(text, feature_version=(3, 7))
