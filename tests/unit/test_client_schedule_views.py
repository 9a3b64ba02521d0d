"""Schedules on the terminal: a fire is shown to the second where that is not zero."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.client.commands import ServerTarget, Terminal
from conveyor.client.schedules import list_schedules, show_schedule
from tests.unit.scripted_server import KEY, RUN, Pace, ok, scripted

ID = "01M8MEDFTGV7KEBCT8GZ4BZHEA"
RATE = {"rate": {"every": 1, "unit": "hour"}}
FIRE = "2026-01-01T21:04:27.123Z"
WHOLE = "2026-01-01T21:05:00.000Z"


def job(following: str) -> dict[str, Any]:
    run = {**RUN, "status": "completed", "updated_at": "2026-01-01T20:05:31.000Z"}
    fields = {"status": "closed", "schedule": RATE, "schedule_state": "active", "latest_run": run}
    return {"job_id": ID, "next_scheduled_run": following, **fields}


async def test_a_list_shows_the_seconds_of_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(ok({"jobs": [job(FIRE), job(WHOLE)]})) as server:
        target = ServerTarget(server.origin, KEY, Pace())
        await list_schedules(target, Terminal(), limit=9, jsonl=False)

    lines = capsys.readouterr().out.splitlines()
    ended = "completed 2026-01-01 20:05"
    assert lines[0] == f"{'job':<26}  {'next fire':<19}  last run"
    assert lines[1::2] == [
        f"{ID}  2026-01-01 21:04:27  {ended}",
        f"{ID}  2026-01-01 21:05     {ended}",
    ]
    assert all(len(line) <= 80 for line in lines)


async def test_a_schedule_shows_the_seconds_of_its_fires(
    capsys: pytest.CaptureFixture[str],
) -> None:
    local = FIRE[:19] + "+00:00"
    shown = {
        "job_id": ID,
        "schedule": RATE,
        "schedule_state": "active",
        "fires": [{"at": FIRE, "local_time": local}],
    }
    fires = [
        {"fire_id": "F", "status": "started", "local_time": local},
        {
            "fire_id": "E",
            "status": "skipped",
            "local_time": local,
            "last_local_time": WHOLE,
            "count": 2,
        },
    ]
    with scripted(ok(shown), ok({"fires": fires})) as server:
        await show_schedule(ServerTarget(server.origin, KEY, Pace()), Terminal(), ID)

    assert capsys.readouterr().out.splitlines()[1:] == [
        "next     2026-01-01 21:04:27",
        "started  2026-01-01 21:04:27",
        "skipped  2026-01-01 21:04:27 to 2026-01-01 21:05, 2 times",
    ]
