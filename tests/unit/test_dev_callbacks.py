"""Callbacks where there is no state machine: a file that a test can read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from conveyor.dev.binding import open_binding
from conveyor.dev.callbacks import MOST_SENT, FileCallbacks
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.gateway.fake import key_digest
from conveyor.testing.clock import FakeClock

TOKEN = "a-token-that-no-log-names"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "callbacks.jsonl"


def left_open(path: Path) -> None:
    path.touch(mode=0o644)


def no_file(path: Path) -> None:
    path.mkdir()


def permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


def told(path: Path) -> list[dict[str, Any]]:
    """Return the lines; empty if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_the_last_callbacks_are_shown_without_their_tokens(path: Path) -> None:
    callbacks = FileCallbacks(path, FakeClock(start=1_804_500_000_123))
    assert await callbacks.sent() == []
    await callbacks.send_success(TOKEN, output='{"run_id":"R"}')
    await callbacks.send_failure("another", error="Conveyor.RunStopped", cause="no JSON")
    done, stopped = await callbacks.sent()
    assert (done.at, done.succeeded) == ("2027-03-08T10:00:00.123Z", True)
    assert done.output == {"run_id": "R"}
    assert TOKEN not in str(done)
    assert done.task_token == f"sha256:{key_digest(TOKEN)}"
    assert (stopped.succeeded, stopped.error, stopped.cause) == (
        False,
        "Conveyor.RunStopped",
        "no JSON",
    )
    for _ in range(MOST_SENT):
        await callbacks.send_success(TOKEN, output="1")
    shown = await callbacks.sent()
    assert [one.output for one in shown] == [1] * MOST_SENT
    await callbacks.clear()
    assert await callbacks.sent() == []


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"at":1,"task_tok',
        b"[1]\n",
        b'{"at":1}\n',
        b'{"at":1e3,"task_token":"t","succeeded":true}\n',
        b'{"at":999999999999999999,"task_token":"t","succeeded":true}\n',
        b"\xff\n",
        b"[" * 100_000,
    ],
    ids=range(7),
)
async def test_a_damaged_line_hides_no_other(
    path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = FileCallbacks(path, FakeClock())
    await callbacks.send_success(TOKEN, output="1")
    with path.open("ab") as file:
        file.write(damaged)
    await callbacks.send_success(TOKEN, output="2")
    assert [one.output for one in await callbacks.sent()] == [1, 2]
    assert caplog.messages == ["callbacks.jsonl: left out 1 damaged lines"]


async def test_each_end_is_a_line_that_only_its_owner_may_read(path: Path) -> None:
    clock = FakeClock()
    left_open(path)
    callbacks = FileCallbacks(path, clock)
    await callbacks.send_success(TOKEN, output='{"run_id":"R","stats":{"total":3}}')
    await clock.advance(1)
    await callbacks.send_failure(TOKEN, error="Conveyor.RunStopped", cause='{"run_id":"R"}')
    await callbacks.send_failure(TOKEN, error="Other", cause="no JSON\nat all")

    first, second, third = told(path)
    assert first == {
        "at": clock.now() - 1_000,
        "task_token": TOKEN,
        "succeeded": True,
        "output": {"run_id": "R", "stats": {"total": 3}},
    }
    assert second == {
        "at": clock.now(),
        "task_token": TOKEN,
        "succeeded": False,
        "error": "Conveyor.RunStopped",
        "cause": {"run_id": "R"},
    }
    assert third["cause"] == "no JSON\nat all"
    assert permissions(path) == 0o600


async def test_lines_of_many_at_once_stay_whole(path: Path) -> None:
    callbacks = FileCallbacks(path, FakeClock())
    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(send, callbacks, number)

    assert sorted(line["task_token"] for line in told(path)) == sorted(map(str, range(20)))


async def send(callbacks: FileCallbacks, number: int) -> None:
    await callbacks.send_success(str(number), output=json.dumps({"text": "x" * 20_000}))


async def test_a_heartbeat_leaves_no_trace_of_the_token(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "conveyor.callbacks")
    await FileCallbacks(path, FakeClock()).send_heartbeat(TOKEN)

    assert caplog.records
    assert TOKEN not in caplog.text
    assert told(path) == []


async def test_a_file_that_cannot_be_written_is_unavailable(path: Path) -> None:
    no_file(path)
    with pytest.raises(ConveyorError) as refused:
        await FileCallbacks(path, FakeClock()).send_success(TOKEN, output="{}")
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert TOKEN not in str(refused.value)


async def test_the_development_binding_tells_into_its_directory(tmp_path: Path) -> None:
    binding = await open_binding(tmp_path / "data", FakeClock())
    await binding.ports.callbacks.send_success(TOKEN, output="{}")
    await binding.ports.aclose()

    assert [line["output"] for line in told(tmp_path / "data" / "callbacks.jsonl")] == [{}]
