"""The driver of the child process that checks lists: neither outlives the other's interest in it.

Scripted children show what the real one does only when something is wrong.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.intake.frames import Chunk, Done, Head, ListSource, ValidationRequest
from conveyor.service.list_validation import CHILDREN, ESTIMATE_AFTER, ListValidator, Pieces
from conveyor.testing.clock import FakeClock

RUN = "01K00000000000000000000000"
WORK = ValidationRequest(source=ListSource.DOCUMENT, run_id=RUN)
PIECE = b"x" * 65_536
DEADLINE = 30.0

PRELUDE = """
import os, sys, time
from pathlib import Path
from conveyor.domain.errors import ErrorCode
from conveyor.intake.frames import Chunk, Done, Refusal, encode_frame
Path(sys.argv[1], str(os.getpid())).touch()
def say(frame):
    for piece in encode_frame(frame):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
"""
COUNTS = "sys.stdin.buffer.readline(); say(Done(len(sys.stdin.buffer.read()), 1))"
TALKS_WHILE_IT_READS = """
sys.stdin.buffer.readline()
read = 0
while block := sys.stdin.buffer.read(65536):
    say(Chunk(read, len(block), b"y" * 1_000_000))
    read += len(block)
say(Done(read, 1))
"""
REFUSES_AT_ONCE = "say(Refusal(ErrorCode.INVALID_ARGUMENT, 'record 1, line 1: no'))"
DIES = "sys.stdin.buffer.readline(); say(Chunk(0, 1, b'[]')); os._exit(3)"
BREAKS_OFF_IN_A_FRAME = "sys.stdout.buffer.write(b'C\\\\0\\\\0\\\\1\\\\0abc'); sys.stdout.flush()"
BABBLES = "sys.stdout.buffer.write(b'?\\\\0\\\\0\\\\0\\\\0'); sys.stdout.flush(); time.sleep(600)"
READS_AND_HANGS = "sys.stdin.buffer.read(); time.sleep(600)"
READS_SLOWLY = "sys.stdin.buffer.read(1_000_000); time.sleep(600)"
TELLS_ITS_ENVIRONMENT = """
names = sorted(name for name in os.environ if name != 'LC_CTYPE')
say(Refusal(ErrorCode.CONFLICT, ' '.join(names)))
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Children:
    """Scripted children, and which of them were started."""

    def __init__(self, directory: Path, clock: FakeClock) -> None:
        self._directory = directory
        self._clock = clock
        self.frames: list[Head | Chunk] = []

    def stager(self, script: str, *, max_seconds: float = 20.0) -> ListValidator:
        source = PRELUDE + script.replace("\\\\", "\\")
        command = [sys.executable, "-c", source, str(self._directory)]
        return ListValidator(self._clock, max_seconds=max_seconds, command=command)

    async def sink(self, frame: Head | Chunk) -> None:
        self.frames.append(frame)

    async def run(self, stager: ListValidator, pieces: Pieces, *, total: int | None = None) -> Done:
        size = sum(map(len, pieces)) if isinstance(pieces, list) else 0
        return await stager.stage(WORK, pieces, total=total or size, sink=self.sink)

    def started(self) -> list[int]:
        return [int(path.name) for path in self._directory.iterdir()]

    async def has_started(self, count: int) -> None:
        with anyio.fail_after(DEADLINE):
            while len(self.started()) < count:
                await SystemClock().sleep(0.01)

    def alive(self) -> list[int]:
        return [pid for pid in self.started() if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def children(tmp_path: Path, clock: FakeClock) -> Children:
    return Children(tmp_path, clock)


class Fed:
    """A number of pieces. `reached` is set once `after` of them have gone to the child."""

    def __init__(self, count: int, *, after: int) -> None:
        self.size = count * len(PIECE)
        self.reached = anyio.Event()
        self._count = count
        self._after = after

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number in range(self._count):
            if number == self._after:
                self.reached.set()
            yield PIECE
        self.reached.set()


async def refusal(
    children: Children, stager: ListValidator, pieces: Pieces, *, total: int | None = None
) -> ConveyorError:
    with pytest.raises(ConveyorError) as caught:
        await children.run(stager, pieces, total=total)
    assert children.started()
    assert children.alive() == []
    return caught.value


async def test_the_whole_list_arrives_and_the_child_is_gone_afterwards(children: Children) -> None:
    done = await children.run(children.stager(COUNTS), [PIECE] * 20 + [b"end"])

    assert done == Done(20 * len(PIECE) + 3, 1)
    assert len(children.started()) == 1
    assert children.alive() == []


async def test_a_list_may_come_as_it_is_read(children: Children) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
            yield PIECE

    assert (await children.run(children.stager(COUNTS), pieces())).rows == 5 * len(PIECE)


async def test_neither_pipe_blocks_the_other(children: Children) -> None:
    done = await children.run(children.stager(TALKS_WHILE_IT_READS), [PIECE] * 40)

    assert done.rows == 40 * len(PIECE)
    assert sum(frame.count for frame in children.frames if isinstance(frame, Chunk)) == done.rows
    assert len(children.frames) == 40


async def test_a_list_may_be_refused_before_it_was_read(children: Children) -> None:
    error = await refusal(children, children.stager(REFUSES_AT_ONCE), [PIECE] * 100)

    assert (error.code, error.detail) == (ErrorCode.INVALID_ARGUMENT, "record 1, line 1: no")


@pytest.mark.parametrize("script", [DIES, BREAKS_OFF_IN_A_FRAME, BABBLES, "sys.exit(1)"])
async def test_a_child_that_breaks_off(children: Children, script: str) -> None:
    error = await refusal(children, children.stager(script), [PIECE] * 100)

    assert error.code is ErrorCode.UNAVAILABLE


async def test_a_child_that_cannot_be_started(clock: FakeClock) -> None:
    stager = ListValidator(clock, max_seconds=20, command=["/nowhere/python"])

    with pytest.raises(ConveyorError) as caught:
        await stager.stage(WORK, [b"{}"], total=2, sink=Children(Path(), clock).sink)

    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "/nowhere" not in caught.value.detail


async def test_a_list_that_breaks_off_takes_the_child_with_it(children: Children) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield PIECE
        await children.has_started(1)
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the disk is gone")

    assert (await refusal(children, children.stager(COUNTS), pieces())).detail == "the disk is gone"


async def test_a_sink_that_fails_takes_the_child_with_it(children: Children) -> None:
    async def full(_frame: Head | Chunk) -> None:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "no space left")

    stager = children.stager(TALKS_WHILE_IT_READS)
    with pytest.raises(ConveyorError, match="no space left"):
        await stager.stage(WORK, [PIECE] * 100, total=len(PIECE) * 100, sink=full)

    assert children.alive() == []


async def test_a_cancelled_check_leaves_no_process(children: Children) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(children.run, children.stager(READS_AND_HANGS), [PIECE])
        await children.has_started(1)
        assert len(children.alive()) == 1
        group.cancel_scope.cancel()

    assert children.alive() == []


async def test_a_child_killed_from_outside(children: Children) -> None:
    errors: list[ConveyorError] = []

    async def check() -> None:
        errors.append(await refusal(children, children.stager(READS_AND_HANGS), [PIECE]))

    async with anyio.create_task_group() as group:
        group.start_soon(check)
        await children.has_started(1)
        os.kill(children.started()[0], 9)

    assert [error.code for error in errors] == [ErrorCode.UNAVAILABLE]


@pytest.mark.slow
async def test_two_at_a_time_and_the_others_wait_their_turn(children: Children) -> None:
    stager = children.stager(READS_AND_HANGS)

    async def check() -> None:
        with pytest.raises(ConveyorError):
            await children.run(stager, [PIECE])

    async with anyio.create_task_group() as group:
        for _ in range(CHILDREN + 2):
            group.start_soon(check)
        await children.has_started(CHILDREN)
        with anyio.fail_after(DEADLINE):
            while stager._limiter.statistics().tasks_waiting < 2:  # noqa: ASYNC110  (no event tells)
                await anyio.sleep(0.001)
        assert len(children.started()) == CHILDREN
        for further in (1, 2):
            os.kill(children.alive()[0], 9)
            await children.has_started(CHILDREN + further)
            assert len(children.alive()) == CHILDREN
        for pid in children.alive():
            os.kill(pid, 9)

    assert children.alive() == []


async def test_a_list_that_would_take_too_long_is_refused(
    children: Children, clock: FakeClock
) -> None:
    errors: list[ConveyorError] = []
    stager = children.stager(READS_SLOWLY, max_seconds=20)
    fed = Fed(400, after=15)

    async def check() -> None:
        errors.append(await refusal(children, stager, aiter(fed), total=fed.size))

    async with anyio.create_task_group() as group:
        group.start_soon(check)
        with anyio.fail_after(DEADLINE):
            await fed.reached.wait()
        assert errors == []
        with anyio.fail_after(DEADLINE):
            while not errors:
                await clock.advance(0.5)
                await anyio.sleep(0.01)

    assert errors[0].code is ErrorCode.PAYLOAD_TOO_LARGE
    assert "CONVEYOR_MAX_VALIDATION_SECONDS allows 20" in errors[0].detail
    # It read 15 of 400 pieces in two seconds, or a few more.
    [estimate] = re.findall(r"would take about (\d+) s", errors[0].detail)
    assert 40 <= int(estimate) <= 54
    assert ESTIMATE_AFTER <= clock.monotonic() < 20


async def test_a_list_that_was_read_may_not_take_longer_either(
    children: Children, clock: FakeClock
) -> None:
    errors: list[ConveyorError] = []
    stager = children.stager(READS_AND_HANGS, max_seconds=20)
    fed = Fed(40, after=40)

    async def check() -> None:
        errors.append(await refusal(children, stager, aiter(fed), total=fed.size))

    async with anyio.create_task_group() as group:
        group.start_soon(check)
        with anyio.fail_after(DEADLINE):
            await fed.reached.wait()
        await clock.advance(19)
        assert errors == []
        with anyio.fail_after(DEADLINE):
            while not errors:
                await clock.advance(0.5)
                await anyio.sleep(0.01)

    assert errors[0].code is ErrorCode.PAYLOAD_TOO_LARGE


async def test_a_child_gets_nothing_of_the_servers_environment(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVEYOR_SECRET", "s" * 32)

    error = await refusal(children, children.stager(TELLS_ITS_ENVIRONMENT), [b"{}"])

    assert error.detail == "PYTHONPATH"


@pytest.mark.slow
def test_a_directory_in_which_the_server_runs_cannot_change_the_child(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
    program = (
        "import anyio, sys\n"
        "from conveyor.clock import SystemClock\n"
        "from conveyor.intake.frames import ListSource, ValidationRequest\n"
        "from conveyor.service.list_validation import ListValidator\n"
        "async def sink(frame): print(type(frame).__name__)\n"
        "async def main():\n"
        '    body = b\'{"tasks": [{"url": "https://a.test/"}]}\'\n'
        f"    work = ValidationRequest(source=ListSource.DOCUMENT, run_id={RUN!r})\n"
        "    stager = ListValidator(SystemClock(), max_seconds=20)\n"
        "    print(await stager.stage(work, [body], total=len(body), sink=sink))\n"
        "anyio.run(main)\n"
    )
    root = str(Path(__file__).parents[2])

    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )

    head, chunk, done, *_ = ran.stdout.split("\n")
    assert (head, chunk) == ("Head", "Chunk"), ran.stderr
    assert done.startswith("Done(rows=1, units=1,")
