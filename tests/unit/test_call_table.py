"""The table of gateway calls under way: what a killed process leaves in it, and what a boot reads
there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.dev import call_table
from conveyor.dev.binding import DevBinding, open_binding
from conveyor.dev.call_table import BegunCalls, CallTable, read_begun
from conveyor.domain.ids import task_id
from conveyor.domain.model import TaskStatus
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.tasks import Claimed, ClaimRequest
from tests.unit.http_api import Api, open_api

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
LIFE = "01BX5ZZKBKACTAV9WEVGEMMVRZ"
OTHER_LIFE = "01BX5ZZKBKACTAV9WEVGEMMVS0"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def room_for_calls() -> None:
    """Leave the ledgers as large as they are: these tests fill one."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls"


def claim(number: int) -> tuple[str, str, int]:
    return RUN, task_id(RUN, number), number + 1


def test_notes_are_read_without_their_process_having_closed_anything(path: Path) -> None:
    table = CallTable(path, LIFE)
    notes = [table.begin(*claim(number)) for number in range(3)]
    table.end(notes[1])
    assert read_begun(path) == BegunCalls(LIFE, frozenset({claim(0), claim(2)}))


def test_a_note_that_was_removed_makes_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = CallTable(path, LIFE)
    for number in range(3 * call_table.ENTRIES):
        table.end(table.begin(*claim(number)))
    assert read_begun(path) == BegunCalls(LIFE, frozenset())


def test_a_call_without_room_makes_the_table_say_nothing(path: Path) -> None:
    table = CallTable(path, LIFE)
    notes = [table.begin(*claim(number)) for number in range(call_table.ENTRIES)]
    assert read_begun(path) is not None
    table.end(table.begin(*claim(call_table.ENTRIES)))
    assert read_begun(path) is None
    for note in notes:
        table.end(note)
    assert read_begun(path) is None


def test_a_new_table_takes_the_place_of_the_one_before(path: Path) -> None:
    CallTable(path, LIFE).begin(*claim(0))
    CallTable(path, OTHER_LIFE)
    assert read_begun(path) == BegunCalls(OTHER_LIFE, frozenset())
    assert os.listdir(path.parent) == ["calls"]
    assert path.stat().st_mode & 0o777 == 0o600
    # Every block is there: to touch a hole of a file on a full disk would end the process.
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_table_that_cannot_be_written_is_in_memory_alone(tmp_path: Path) -> None:
    table = CallTable(tmp_path / "missing" / "calls", LIFE)
    table.end(table.begin(*claim(0)))
    assert table.begin(*claim(1)) >= 0
    assert read_begun(tmp_path / "missing" / "calls") is None


def _torn(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _other_entry(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[64:70] = b"!noid!"
    path.write_bytes(data)


def _other_state(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[127] = 7
    path.write_bytes(data)


def _other_mark(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"calls 1", b"calls 9"))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], object]] = [
    Path.unlink,
    _torn,
    _other_entry,
    _other_state,
    _other_mark,
    _directory,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_table_says_nothing(path: Path, damage: Callable[[Path], object]) -> None:
    table = CallTable(path, LIFE)
    table.begin(*claim(0))
    damage(path)
    assert read_begun(path) is None


# -- at boot --


async def abandoned(api: Api, *, begun: int, tasks: int = 4) -> tuple[str, list[str]]:
    """Claim tasks of a new run, let the first `begun` calls begin, and abandon them; return the
    run and its tasks."""
    job = await api.submit(tasks)
    run_id = job["latest_run"]["run_id"]
    task_ids = [task.task_id for task in await api.tasks_of(run_id)]
    pipeline = pipeline_of(api)
    now = api.clock.now()
    holder = f"{pipeline.calls.life}/worker/1"
    claims = await pipeline.tasks.claim_tasks(
        [ClaimRequest(run_id, one, holder, now, now + 60_000, 10) for one in task_ids]
    )
    for claim in claims[:begun]:
        assert isinstance(claim, Claimed)
        pipeline.calls.begin(run_id, claim.task.task_id, claim.task.claim_number)
    return run_id, task_ids


def pipeline_of(api: Api) -> Pipeline:
    pipeline = api.binding.pipeline
    assert pipeline is not None
    return pipeline


async def reopened(directory: Path) -> DevBinding:
    """Open a directory whose process is gone."""
    return await open_binding(directory, SystemClock())


async def interrupted(dev: DevBinding, run_id: str, task_ids: list[str]) -> list[int]:
    """Claim all tasks, which must be free, and return the interruptions of each."""
    now = SystemClock().now() + 1_000
    claims = await dev.store.tasks.claim_tasks(
        [ClaimRequest(run_id, one, "later", now, now + 60_000, 10) for one in task_ids]
    )
    found = []
    for claim in claims:
        assert isinstance(claim, Claimed), claim
        events = await dev.store.tasks.task_history(run_id, claim.task.task_id)
        assert events is not None
        assert len(events) == claim.task.interruptions
        found.append(claim.task.interruptions)
    return found


async def test_claims_whose_calls_had_not_begun_are_undone_at_boot(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        run_id, task_ids = await abandoned(api, begun=2)
    dev = await reopened(tmp_path)
    rows = await dev.store.tasks.page_tasks(run_id, statuses=None, after=None, limit=10)
    statuses = [task.status for task in rows.tasks]
    assert statuses == [TaskStatus.PROCESSING] * 2 + [TaskStatus.PENDING] * 2
    assert await interrupted(dev, run_id, task_ids) == [1, 1, 0, 0]
    await dev.ports.aclose()


async def test_a_boot_cut_short_is_made_again(tmp_path: Path) -> None:
    """The claims of an earlier life that no boot undid stay what they were."""
    async with open_api(tmp_path) as api:
        run_id, task_ids = await abandoned(api, begun=2)
    for _ in range(3):
        await (await reopened(tmp_path)).ports.aclose()
    dev = await reopened(tmp_path)
    assert await interrupted(dev, run_id, task_ids) == [1, 1, 0, 0]
    await dev.ports.aclose()


@pytest.mark.parametrize("kind", ["missing", "damaged", "foreign"])
async def test_without_a_table_to_trust_every_claim_counts_as_begun(
    tmp_path: Path, kind: str
) -> None:
    async with open_api(tmp_path / "a") as api:
        run_id, task_ids = await abandoned(api, begun=1)
    await (await reopened(tmp_path / "b")).ports.aclose()
    path = tmp_path / "a" / "calls"
    if kind == "missing":
        path.unlink()
    elif kind == "damaged":
        _torn(path)
    else:
        path.write_bytes((tmp_path / "b" / "calls").read_bytes())
    dev = await reopened(tmp_path / "a")
    assert await interrupted(dev, run_id, task_ids) == [1, 1, 1, 1]
    await dev.ports.aclose()
