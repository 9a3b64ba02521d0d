"""`conveyor open`: the dashboard in the reader's browser, or its address where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from conveyor.testing.local_server import ConveyorServer
from tests.acceptance.support_wire import KEY
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow]


def opened(server: ConveyorServer, *words: str, browser: str) -> tuple[int, str, str]:
    """Run the command with this program as the browser."""
    environment = {**os.environ, "BROWSER": browser, "PATH": "/nowhere"}
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "conveyor", "open", *words, "--server", server.base_url]
    done = subprocess.run(
        [*command, "--api-key", KEY], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_open_names_the_page_of_a_job_to_the_browser(
    conveyor_server: ConveyorServer, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >>{seen}\n')
    browser.chmod(0o755)
    origin = conveyor_server.base_url.removesuffix("/v1")
    made = httpx.post(
        f"{conveyor_server.base_url}/jobs",
        headers={"X-API-Key": KEY},
        json={"tasks": [{"url": conveyor_server.url("page")}]},
        trust_env=False,
        timeout=SECONDS,
    ).json()
    address = f"{origin}/dashboard/jobs/{made['job_id']}"
    code, said, errors = opened(conveyor_server, "last", browser=f"{browser} %s")
    assert (code, said, errors) == (0, f"{address}\n", "")
    assert seen.read_text() == f"{address}\n"
    shown = httpx.get(address, trust_env=False, timeout=SECONDS)
    assert (shown.status_code, made["job_id"] in shown.text) == (200, True)


def test_open_prints_the_address_without_a_browser(conveyor_server: ConveyorServer) -> None:
    origin = conveyor_server.base_url.removesuffix("/v1")
    code, said, errors = opened(conveyor_server, "--json", browser="/no/such/browser %s")
    assert code == 0, errors
    assert json.loads(said) == {"address": f"{origin}/dashboard", "opened": False}


def test_open_refuses_what_is_no_job_id(conveyor_server: ConveyorServer, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    for text in ("../x", "no job", "01ARZ3NDEKTSV4RRFFQ69G5FAV/../.."):
        code, said, errors = opened(conveyor_server, text, browser=f"touch {seen} %s")
        assert (code, said) == (1, "")
        assert errors == f"conveyor: no job id: {text}\n"
    assert not seen.exists()
