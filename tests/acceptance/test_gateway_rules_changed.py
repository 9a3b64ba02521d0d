"""Rules that change while tasks run: each call is answered by the old or the new ones."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_wire import eventually
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.slow]

TASKS = 200
CHANGES = 4
WRONG = 20


def test_no_call_is_lost_while_rules_change_and_wrong_files_are_told_once(tmp_path: Path) -> None:
    rules = tmp_path / "gateway.toml"
    _write(rules, _rules(0))
    flags = ("--gateway", "fake", "--workers", "4", "--rules", str(rules))
    with boot(tmp_path / "server", *flags) as server:
        token = json.loads(server.stdout.read_bytes())["dev_token"]
        headers = {"X-API-Key": "k", "Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=server.origin, headers=headers, timeout=SECONDS) as client:
            tasks = [{"url": f"https://shop.example/{number}"} for number in range(TASKS)]
            made = client.post("/v1/jobs", json={"tasks": tasks, "auto_close": True})
            assert made.status_code == 201, made.text
            job = f"/v1/jobs/{made.json()['job_id']}"
            for change in range(1, CHANGES):
                _write(rules, _rules(change))
                eventually(partial(_is_followed, client, change), "new rules hold")
            run = eventually(partial(_ended_run, client, job), "the run has ended", timeout=120)
            assert run["stats"]["successful"] == TASKS
            calls = client.get("/_dev/gateway/requests").json()
            assert calls["total"] == len(calls["requests"]) == TASKS
            used = {call["rule"] for call in calls["requests"]}
            assert used <= set(range(CHANGES))
            assert len(used) > 1
        for number in range(WRONG):
            _write(rules, "\n" * number + f"word_{number} = 1")
            eventually(partial(_has_told, server, f"word_{number}:"), "the error is told")
        lines = server.stderr.read_text().splitlines()
    told = [line for line in lines if "word_" in line]
    assert len(told) == WRONG
    for number, line in enumerate(told):
        assert f"{rules}, line {number + 1}: word_{number}: is none of" in line


def _rules(change: int) -> str:
    """Rules of which the one of this number answers."""
    others = '[[rules]]\nhost = "other.example"\n' * change
    return f'{others}[[rules]]\nhost = "shop.example"\ndelay = 0.2\n'


def _write(path: Path, text: str) -> None:
    """Replace a file at once, as an editor does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def _is_followed(client: httpx.Client, change: int) -> bool | None:
    rules = client.get("/_dev/gateway/requests").json()["rules"]
    return True if len(rules) == change + 1 and rules[-1]["calls"] else None


def _ended_run(client: httpx.Client, job: str) -> dict[str, Any] | None:
    run: dict[str, Any] = client.get(job).json()["latest_run"]
    return run if run["status"] == "completed" else None


def _has_told(server: Booted, text: str) -> bool | None:
    return True if text in server.stderr.read_text() else None
