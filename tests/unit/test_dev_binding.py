"""Opening a data directory takes up the work of an earlier process."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from conveyor.clock import ManualClock
from conveyor.dev.binding import open_binding
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer, secret_bytes
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.pacing import HostState
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage
from conveyor.records.blob_keys import result_key
from conveyor.testing.clock import FakeClock
from tests.conformance.world import CALLER, World
from tests.disk import files_below

START = 1_800_000_000_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_bodies_of_no_run_are_scrubbed_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    job_id, run_id, task_id = clock.new_id(), clock.new_id(), "0" * 26
    first = await open_binding(tmp_path, clock)
    await first.ports.blobs.put(result_key(job_id, run_id, task_id, 1, 30), b"left behind")
    await first.ports.aclose()

    second = await open_binding(tmp_path, clock)
    [delivery] = await second.queues.receive(CONTROL_QUEUE, limit=10, visibility=1.0)
    assert delivery.message == DeleteMessage(job_id, run_id)
    await second.ports.aclose()


async def test_a_host_is_called_an_interval_after_a_restart_at_the_earliest(tmp_path: Path) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    assert (await first.ports.pacing.book("host:a", 8.0)).starts == (0.0,)
    await first.ports.aclose()
    second = await open_binding(tmp_path, clock)
    assert (await second.ports.pacing.book("host:a", 8.0)).starts == (8.0,)
    await second.ports.aclose()


async def test_a_host_that_asked_for_a_pause_is_left_alone_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    await first.ports.pacing.close("host:a", 3_600.0)
    await first.ports.pacing.close("host:a", 60.0)
    await first.ports.pacing.close("host:k:b", 30.0)
    await first.ports.pacing.close("host:c", 0.9)
    await first.ports.pacing.close("host:d", 1.0)
    await clock.advance(100.0)
    await first.ports.aclose()
    clock.shift(-7_200.0)
    second = await open_binding(tmp_path, clock)
    told = await second.ports.pacing.state(["host:a", "host:k:b", "host:c", "host:d"])
    said = {"host:a": 3_600.0, "host:k:b": 30.0, "host:d": 1.0}
    assert told == {host: HostState(seconds) for host, seconds in said.items()}
    await second.ports.aclose()
    clock.shift(7_200.0)
    third = await open_binding(tmp_path, clock)
    booking = await third.ports.pacing.book("host:x", 0.0, also={"host:a": 0.0})
    assert booking.starts == ()
    assert booking.closed_for == pytest.approx(3_500.0)
    assert set(await third.ports.pacing.state(["host:a", "host:k:b"])) == {"host:a"}
    await third.clear()
    assert not await third.ports.pacing.state(["host:a"])
    await third.ports.aclose()
    fourth = await open_binding(tmp_path, clock)
    assert not await fourth.ports.pacing.state(["host:a"])
    await fourth.ports.aclose()


async def test_a_longer_pause_is_known_after_a_restart_though_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    await first.ports.pacing.close("host:a", 60.0)
    clock.shift(-10_800.0)
    await first.ports.pacing.close("host:a", 3_600.0)
    await first.ports.pacing.close("host:a", 30.0)
    await first.ports.aclose()
    second = await open_binding(tmp_path, clock)
    assert await second.ports.pacing.state(["host:a"]) == {"host:a": HostState(3_600.0)}
    await second.ports.aclose()


async def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "conveyor.db").write_bytes(b"no database at all" * 500)
    with pytest.raises(ConveyorError, match=str(tmp_path)):
        await open_binding(tmp_path, FakeClock())
    # The directory is free again.
    (tmp_path / "conveyor.db").unlink()
    again = await open_binding(tmp_path, FakeClock())
    await again.ports.aclose()


async def _with_a_job(directory: Path, *, secret: str) -> FakeClock:
    """A directory in which somebody submitted a job under a root secret."""
    clock = FakeClock()
    dev = await open_binding(directory, clock, secret=secret)
    world = World(dev.store, clock)
    sealer = KeySealer([dev.ports.root_secret])
    sealed = sealer.seal("a key", caller=CALLER, nonce=clock.token(NONCE_LENGTH))
    await world.submit(1, sealed_key=sealed)
    await dev.ports.aclose()
    return clock


async def _reopen(directory: Path, clock: FakeClock, *secrets: str) -> None:
    first, *older = secrets
    dev = await open_binding(
        directory, clock, secret=first, older_secrets=[*map(secret_bytes, older)]
    )
    await dev.ports.aclose()


def _forget_fingerprints(directory: Path) -> None:
    """Make the database one that an earlier version wrote, which knew no fingerprint."""
    with closing(sqlite3.connect(directory / "conveyor.db")) as database:
        database.execute("DELETE FROM root_secrets")
        database.commit()


@pytest.mark.parametrize("earlier_version", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["given before", "its own before"])
async def test_jobs_under_another_root_secret_are_not_orphaned(
    tmp_path: Path, own: bool, earlier_version: bool
) -> None:
    before, after = ("", "a secret of production") if own else ("a secret of production", "")
    clock = await _with_a_job(tmp_path, secret=before)
    if earlier_version:
        _forget_fingerprints(tmp_path)
    for _ in range(2):
        with pytest.raises(ConveyorError, match="CONVEYOR_SECRET") as refused:
            await _reopen(tmp_path, clock, after)
        assert refused.value.code is ErrorCode.CONFLICT
        assert str(tmp_path) in refused.value.detail
        assert "\n" not in refused.value.detail
        assert "secret of production" not in refused.value.detail
    await _reopen(tmp_path, clock, before)


async def test_a_root_secret_that_was_lost_is_told(tmp_path: Path) -> None:
    clock = await _with_a_job(tmp_path, secret="")
    secret = tmp_path / "secret"
    kept = secret.read_text()
    secret.unlink()
    with pytest.raises(ConveyorError, match="another root secret"):
        await _reopen(tmp_path, FakeClock(seed=2), "")
    assert not secret.exists(), "another one is in nobody's way"
    secret.write_text(kept)
    await _reopen(tmp_path, clock, "")


async def test_secrets_may_be_rotated_and_none_is_stored(tmp_path: Path) -> None:
    clock = await _with_a_job(tmp_path, secret="old secret")
    await _reopen(tmp_path, clock, "new secret", "old secret")
    await _reopen(tmp_path, clock, "newest secret", "new secret", "old secret")
    await _reopen(tmp_path, clock, "newest secret", "old secret")
    with pytest.raises(ConveyorError, match="another root secret"):
        await _reopen(tmp_path, clock, "a strange secret")
    stored = b"".join(path.read_bytes() for path in files_below(tmp_path))
    assert not re.search(rb"(old|new|newest) secret", stored)


async def test_a_directory_without_jobs_takes_any_root_secret(tmp_path: Path) -> None:
    clock = FakeClock()
    for secret in ("one secret", "another secret"):
        await _reopen(tmp_path, clock, secret)


@pytest.mark.parametrize("secrets", [("new secret",), ("old secret", "new secret")])
async def test_a_last_secret_that_would_name_callers_anew_is_refused(
    tmp_path: Path, secrets: tuple[str, ...]
) -> None:
    clock = await _with_a_job(tmp_path, secret="old secret")
    await _reopen(tmp_path, clock, "new secret", "old secret")

    with pytest.raises(ConveyorError, match="a list that ends with it"):
        await _reopen(tmp_path, clock, *secrets)
    await _reopen(tmp_path, clock, "new secret", "old secret")


async def test_signing_keys_depend_on_their_root_secret_too(tmp_path: Path) -> None:
    clock = FakeClock()
    await _reopen(tmp_path, clock, "one secret")
    with closing(sqlite3.connect(tmp_path / "conveyor.db")) as database:
        database.execute("INSERT INTO signing_keys VALUES ('caller', 'active', 'kid', 0, x'00')")
        database.commit()
    with pytest.raises(ConveyorError, match="another root secret"):
        await _reopen(tmp_path, clock, "another secret")
    await _reopen(tmp_path, clock, "one secret")


async def _started(path: Path, *, by_hand: bool = False) -> int:
    """Start and end a server; return its last instant."""
    clock = ManualClock(start=START) if by_hand else None
    binding = await open_binding(path, clock or FakeClock(), moved=clock)
    if clock is not None:
        await clock.advance(86_400)
    await binding.ports.aclose()
    return 0 if clock is None else clock.now()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if "--clock manual" in one.getMessage()]
    caplog.clear()
    return found


async def test_a_clock_moved_by_an_earlier_server_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await _started(tmp_path)
    assert not _warnings(caplog)
    ended = await _started(tmp_path, by_hand=True)
    await _started(tmp_path)
    (told,) = _warnings(caplog)
    assert told.startswith("an earlier server of this directory was on a clock")
    await _started(tmp_path)
    assert not _warnings(caplog)
    assert await _started(tmp_path, by_hand=True) > ended, "it goes on from where it was kept"
    await _started(tmp_path)
    assert len(_warnings(caplog)) == 1, "there is news again"


@pytest.mark.parametrize("text", ["", "[]", "no JSON", "\ufeff"])
async def test_a_damaged_file_of_a_clock_keeps_no_server_of_the_systems_clock_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "clock").write_text(text, "utf-8")
    await _started(tmp_path)
    assert len(_warnings(caplog)) == 1
    assert (tmp_path / "clock").read_text("utf-8") == text
