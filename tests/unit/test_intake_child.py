"""The child process itself, over its pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import TaskSpec
from conveyor.intake.frames import Chunk, Done, Refusal, ValidationRequest
from tests.unit.intake_lists import (
    DOCUMENT_WORK,
    URLS_WORK,
    csv_work,
    rows_of,
    split_frames,
    with_limits,
)

COMMAND = [sys.executable, "-m", "conveyor.intake"]
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
MORE_THAN_A_CHUNK = b"http://a.example/\n" * 12_000
"""So little more that what the child leaves unread while it waits for a reader fits its pipe."""
MEMORY = """
import resource, subprocess, sys
command = [sys.executable, "-m", "conveyor.intake"]
ended = subprocess.run(command, stdin=sys.stdin, stdout=sys.stderr)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(ended.returncode, peak * (1 if sys.platform == "darwin" else 1024))
"""


def given(work: ValidationRequest, content: bytes) -> bytes:
    """Return the input of the child."""
    return msgspec.json.encode(work) + b"\n" + content


def start() -> subprocess.Popen[bytes]:
    """A child with pipes on all sides."""
    pipe = subprocess.PIPE
    return subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT)


def whole(content: bytes) -> tuple[bytes, bytes, int]:
    """Return the child's frames, its standard error, and its exit code."""
    with start() as process:
        out, err = process.communicate(content, timeout=SECONDS)
    return out, err, process.returncode


def test_a_file_goes_through_the_process() -> None:
    content = "".join(f"http://a.example/{i},n-{i}\n" for i in range(25_000)).encode()
    out, err, code = whole(given(csv_work(0, 1), content))
    assert (err, code) == (b"", 0)
    frames = list(split_frames(out))
    assert [type(frame) for frame in frames] == [Chunk, Chunk, Chunk, Done]
    expected = [TaskSpec(f"http://a.example/{i}", f"n-{i}") for i in range(25_000)]
    assert rows_of(frames) == expected


def test_a_refusal_is_an_answer_like_another() -> None:
    out, err, code = whole(given(URLS_WORK, b"x\n"))
    assert (err, code) == (b"", 0)
    refusal = next(split_frames(out))
    assert isinstance(refusal, Refusal)
    assert refusal.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"{}", b"rubbish\n", b'{"source":"csv","run_id":"x"}\nhttp://a\n'],
)
def test_what_nobody_foresaw_is_a_refusal_and_no_traceback(content: bytes) -> None:
    out, err, code = whole(content)
    assert list(split_frames(out)) == [Refusal(ErrorCode.INTERNAL, "the list could not be checked")]
    assert code == 0
    assert err.startswith(b"conveyor.intake: unexpected ")
    assert err.count(b"\n") == 1


def test_a_reader_that_goes_away_ends_it_silently() -> None:
    with start() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.write(given(URLS_WORK, MORE_THAN_A_CHUNK))
            process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(SECONDS) == 1


def test_a_list_that_breaks_off_ends_it_like_a_list_that_ends() -> None:
    out, err, code = whole(given(DOCUMENT_WORK, b'{"tasks": [{"url": "http://a.exa'))
    assert (err, code) == (b"", 0)
    refusal = next(split_frames(out))
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("the request body is not JSON")


def test_a_refusal_does_not_wait_for_the_rest_of_the_list() -> None:
    with start() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(given(with_limits(URLS_WORK, rows=5), b"http://a.example/\n" * 4_000))
        process.stdin.flush()
        refusal = list(split_frames(process.stdout.read()))
        assert process.wait(SECONDS) == 0
        assert [getattr(frame, "code", None) for frame in refusal] == [ErrorCode.INVALID_ARGUMENT]


def test_killed_in_the_middle_it_leaves_nothing(tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    environment = dict(os.environ, TMPDIR=str(tmp_path), PYTHONPATH=str(ROOT))
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(given(URLS_WORK, MORE_THAN_A_CHUNK))
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1) == b"C"
        process.kill()
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert err == b""
    assert b'"rows":' not in out
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupt_from_the_terminal_is_left_to_the_server() -> None:
    with start() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(given(URLS_WORK, MORE_THAN_A_CHUNK))
        process.stdin.flush()
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, b"")
    assert len(rows_of(list(split_frames(first + rest)))) == 12_000


@pytest.mark.slow
def test_a_hundred_thousand_inline_tasks_stay_small(tmp_path: Path) -> None:
    tasks = [
        {"url": f"http://a.example/products/{i}", "external_id": f"n-{i}"} for i in range(100_000)
    ]
    file = tmp_path / "given"
    file.write_bytes(given(DOCUMENT_WORK, json.dumps({"tasks": tasks}).encode()))
    with file.open("rb") as source, (tmp_path / "frames").open("wb") as frames:
        ended = subprocess.run(
            [sys.executable, "-c", MEMORY],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=frames,
            cwd=ROOT,
            check=True,
        )
    code, peak = map(int, ended.stdout.split())
    assert code == 0
    assert peak < 120 * 2**20
    assert len(rows_of(list(split_frames((tmp_path / "frames").read_bytes())))) == 100_000


def test_it_starts_without_the_parser_of_urls_and_what_else_is_slow() -> None:
    code = "import json, sys, conveyor.intake.child; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    assert "conveyor.intake.child" in loaded
    heavy = {"aiohttp", "anyio", "asyncio", "cryptography", "pydantic_core", "sqlite3", "starlette"}
    assert not heavy & set(loaded)
    rooms = {name.split(".")[1] for name in loaded if name.startswith("conveyor.")}
    assert rooms == {"intake", "domain"}
