"""The hint for a missing extra installs it where the program runs, not where another pip does."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import conveyor
from conveyor.bootstrap.loop import gateway_of, tracer_of
from conveyor.client.errors import ClientError
from conveyor.client.workbook import as_csv
from conveyor.clock import SystemClock
from conveyor.domain.text_rules import pip_install
from conveyor.engine.telemetry import Telemetry
from conveyor.settings import InvalidSetting, Settings
from tests.disk import files_below

HERE = f"{shlex.quote(sys.executable)} -m pip install"


@pytest.mark.parametrize(
    ("python", "begin"),
    [
        ("/venv/bin/python", "/venv/bin/python -m pip install "),
        ("/my venv/it's/python", """'/my venv/it'"'"'s/python' -m pip install """),
        ("/venv/\x1b[2J/python", "pip install "),
        ("/venv/\udcff/python", "pip install "),
        ("", "pip install "),
        (None, "pip install "),
    ],
)
def test_the_command_is_one_that_a_shell_takes_and_a_terminal_shows(
    monkeypatch: pytest.MonkeyPatch, python: str | None, begin: str
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    command = pip_install("conveyor-batch[parquet]")
    assert command == f"{begin}'conveyor-batch[parquet]'"
    assert command.isprintable()
    assert shlex.split(command)[-1] == "conveyor-batch[parquet]"


@pytest.mark.slow
def test_a_shell_finds_the_pip_of_this_interpreter() -> None:
    command = f"{pip_install('conveyor-batch[parquet]').partition(' install ')[0]} --version"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    assert sys.prefix in shown


def test_each_hint_of_a_setting_or_a_file_names_this_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("conveyor.gateway.aiohttp_client", "conveyor.engine.tracing", "python_calamine"):
        monkeypatch.setitem(sys.modules, name, None)
    settings = Settings(
        gateway="http://gw.test/", http_engine="aiohttp", otlp_endpoint="http://127.0.0.1:1/"
    )
    with pytest.raises(InvalidSetting, match=re.escape(f"{HERE} 'conveyor-batch[aiohttp]'")):
        gateway_of(settings, SystemClock())
    with pytest.raises(InvalidSetting, match=re.escape(f"{HERE} 'conveyor-batch[otel]'")):
        tracer_of(settings, SystemClock(), Telemetry())
    found = pytest.raises(ClientError, match=re.escape(f"{HERE} 'conveyor-batch[xlsx]'"))
    with found, as_csv(io.BytesIO(), "list.xlsx"):
        pass


def test_answers_of_the_api_alone_name_a_pip_without_its_place() -> None:
    """Callers are not to learn where the interpreter of a server lies."""
    package = Path(conveyor.__file__).parent
    found = [one for one in files_below(package, ".py") if "pip install" in one.read_text("utf-8")]
    assert {one.relative_to(package).as_posix() for one in found} == {
        "handlers/export.py",
        "service/exports.py",
        "service/submit.py",
    }
