"""Files of any kind: encodings, gzip, limits, JSON lines, lists of URLs, and memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask, InvalidTaskReason
from conveyor.domain.model import TaskBody, TaskSpec
from conveyor.intake.child import read_file
from conveyor.intake.frames import Frame, ValidationRequest
from conveyor.intake.lines import MAX_LINE_BYTES
from tests.unit.intake_lists import (
    JSONL_WORK,
    URLS_WORK,
    accepted,
    answer,
    csv_work,
    refused,
    with_limits,
)

A, B = "http://a.example/", "http://b.example/ü"
TWO = [TaskSpec(A), TaskSpec(B)]
KINDS = [
    (URLS_WORK, f"{A}\n{B}\n"),
    (JSONL_WORK, f'{{"url":"{A}"}}\n{{"url":"{B}"}}\n'),
    (csv_work(), f"{A}\n{B}\n"),
]
EVERY_KIND = pytest.mark.parametrize(("work", "content"), KINDS, ids=["urls", "jsonl", "csv"])


@EVERY_KIND
def test_every_kind_is_read_in_steps_of_every_size(work: ValidationRequest, content: str) -> None:
    for plain in (content.encode(), ("\ufeff" + content.replace("\n", "\r\n\r\n")).encode()):
        for packed in (plain, gzip.compress(plain)):
            for step in range(1, len(packed) + 2):
                assert accepted(work, packed, step=step) == TWO


NO_UTF8 = (
    "of the file is not UTF-8: save it as UTF-8, or name its encoding (--encoding, cp1252 on "
    "Windows)"
)


@EVERY_KIND
@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-16-le", "UTF-16 (little-endian)"),
        ("utf-16-be", "UTF-16 (big-endian)"),
        ("utf-32-le", "UTF-32 (little-endian)"),
        ("utf-32-be", "UTF-32 (big-endian)"),
    ],
)
def test_other_encodings_are_named(
    work: ValidationRequest, content: str, encoding: str, name: str
) -> None:
    plain = content.encode(encoding)
    marked = ("\ufeff" + content).encode(encoding)
    for file, option in (
        (plain, encoding),
        (marked, encoding[:6]),
        (gzip.compress(plain), encoding),
    ):
        for step in (1, 65_536):
            refusal = refused(work, file, step=step)
            assert refusal.code is ErrorCode.INVALID_ARGUMENT
            assert refusal.detail == (
                f"the file is {name}: save it as UTF-8, or name its encoding (--encoding {option})"
            )


@EVERY_KIND
def test_bytes_that_are_no_text_are_told_with_their_line(
    work: ValidationRequest, content: str
) -> None:
    many = content.encode() * 5_000
    for step in (5, 65_536):
        assert (
            refused(work, content.encode() + b"\nhttp://\xff/\n", step=step).detail
            == f"line 4 {NO_UTF8}"
        )
        nul = many + content.encode()[:9] + b"\0" + many
        expected = "line 10001 of the file holds a NUL byte"
        assert refused(work, nul, step=max(step, 1_000)).detail == expected
    assert refused(work, content.encode() + b"\xc3").detail == f"line 3 {NO_UTF8}"


@EVERY_KIND
def test_a_line_is_bounded(work: ValidationRequest, content: str) -> None:
    limit = f"longer than {MAX_LINE_BYTES:,} bytes"
    long = b"x" * (MAX_LINE_BYTES + 1)
    for file in (long, long + b"\n", long * 3):
        for step in (50_000, 65_536, 10_000_000):
            refusal = refused(work, content.encode() + file, step=step)
            assert refusal.detail == f"line 3 of the file is {limit}"
    blank = b" " * MAX_LINE_BYTES + b"\n"
    assert accepted(work, blank + content.encode() + blank) == TWO


@EVERY_KIND
def test_the_content_is_bounded_packed_or_not(work: ValidationRequest, content: str) -> None:
    plain = content.encode()
    exact = with_limits(work, size=len(plain))
    assert accepted(exact, plain) == accepted(exact, gzip.compress(plain)) == TWO
    below = with_limits(work, size=len(plain) - 1)
    for file, verb in ((plain, "holds"), (gzip.compress(plain), "unpacks to")):
        refusal = refused(below, file)
        assert refusal.code is ErrorCode.PAYLOAD_TOO_LARGE
        assert refusal.detail == (
            f"the file {verb} more than {len(plain) - 1} bytes (CONVEYOR_MAX_INPUT_BYTES)"
        )


@pytest.mark.slow
def test_a_file_that_unpacks_without_end_is_left_early() -> None:
    bomb = gzip.compress(b"\n" * 60_000_000)
    tracemalloc.start()
    try:
        refusal = refused(with_limits(URLS_WORK, size=2_000_000), bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusal.detail == (
        "the file unpacks to more than 2,000,000 bytes (CONVEYOR_MAX_INPUT_BYTES)"
    )
    assert peak < 8_000_000


def test_members_in_a_row_are_one_file_and_zeros_may_follow() -> None:
    first, second = gzip.compress(A.encode()[:9]), gzip.compress(A.encode()[9:] + b"\n")
    file = first + gzip.compress(b"") + b"\0" * 20 + second + gzip.compress(B.encode()) + b"\0" * 9
    for step in (1, 2, 19, 65_536):
        assert accepted(URLS_WORK, file, step=step) == TWO


@pytest.mark.parametrize("step", [1, 100, 65_536])
def test_gzip_that_is_cut_off_or_damaged_is_refused(step: int) -> None:
    file = gzip.compress("\n".join(f"{A}{zlib.crc32(b'%d' % i)}" for i in range(500)).encode())
    for cut in (2, 10, len(file) // 2, len(file) - 8, len(file) - 1):
        refusal = refused(URLS_WORK, file[:cut], step=step)
        assert refusal.code is ErrorCode.INVALID_ARGUMENT
        assert refusal.detail == "the gzip file is cut off: its end is missing"
    middle = len(file) // 2
    damaged = file[:middle] + bytes([file[middle] ^ 0xFF]) + file[middle + 1 :]
    wrong_sum = file[:-8] + b"\0\0\0\0" + file[-4:]
    for bad in (damaged, wrong_sum, file + b"rubbish"):
        assert refused(URLS_WORK, bad, step=step).detail in (
            "the gzip file is damaged",
            "the gzip file is cut off: its end is missing",
        )
    assert refused(URLS_WORK, wrong_sum, step=step).detail == "the gzip file is damaged"


def test_a_list_of_urls() -> None:
    content = f"# shops\n\n  {A}\t\r\n#x\n \n{B}"
    assert accepted(URLS_WORK, content.encode()) == TWO
    refusal = refused(URLS_WORK, f"{A}\n\n# x\nnot a url\n{B}\n{A},{B} c\nh:x\n".encode())
    assert refusal.detail == (
        "3 of 5 tasks in the file are invalid; nothing was created; the first is record 2 at line "
        "4: malformed_url (not a url)"
    )
    assert [(task.index, task.reason) for task in refusal.invalid_tasks] == [
        (1, InvalidTaskReason.MALFORMED_URL),
        (3, InvalidTaskReason.MALFORMED_URL),
        (4, InvalidTaskReason.UNSUPPORTED_SCHEME),
    ]


@pytest.mark.parametrize("content", ["", "\n", "# a\n#b", " \t\r\n"])
def test_a_list_of_no_url(content: str) -> None:
    refusal = refused(URLS_WORK, content.encode())
    assert (refusal.code, refusal.detail) == (
        ErrorCode.INVALID_ARGUMENT,
        "the file holds no task",
    )


def test_json_lines_hold_every_field_of_a_task() -> None:
    lines = [
        {"url": A, "external_id": "x", "metadata": {"k": "v"}, "zenrows_params": {"wait": 5}},
        {"url": B, "method": "post", "body": {"a": [1]}, "unknown": None},
    ]
    content = "\r\n\n".join(map(json.dumps, lines)).encode()
    assert accepted(JSONL_WORK, content) == [
        TaskSpec(A, "x", {"k": "v"}, params={"wait": "5"}),
        TaskSpec(B, method="POST", body=TaskBody('{"a":[1]}', "application/json")),
    ]


@pytest.mark.parametrize(
    ("line", "reason", "value"),
    [
        ('{"url":', "malformed_url", "is not JSON: Expecting value at column 8"),
        ("[1]", "malformed_url", "array"),
        (A, "malformed_url", "is not JSON: Expecting value at column 1"),
        (
            f'{{"url":"{A}","url":"{A}"}}',
            "malformed_url",
            'names the key "url" twice in one object',
        ),
        (f'{{"url":"{A}","x":NaN}}', "malformed_url", "holds NaN, which is not a JSON number"),
        (
            f'{{"url":"{A}"}} {{"url":"{A}"}}',
            "malformed_url",
            "is not JSON: Extra data at column 29",
        ),
        ("{}", "malformed_url", None),
        (f'{{"url":"{A}","method":"PUT"}}', "unsupported_method", "PUT"),
        (f'{{"url":"{A}","zenrows_params":{{"x":1}}}}', "unknown_param", "x"),
        (f'{{"url":"{A}","external_id":""}}', "invalid_external_id", ""),
    ],
)
def test_a_bad_json_line(line: str, reason: str, value: str | None) -> None:
    refusal = refused(JSONL_WORK, f'{{"url":"{A}"}}\n\n{line}\n'.encode())
    shown = "" if value is None else f" ({value})"
    shown += ": a task must be an object" if value == "array" else ""
    assert refusal.detail == (
        f"1 of 2 tasks in the file are invalid; nothing was created; the first is record 2 at line "
        f"3: {reason}{shown}"
    )
    [bad] = refusal.invalid_tasks
    assert (bad.index, bad.reason, bad.value, bad.line) == (1, reason, value, 3)
    assert bad.detail in (None, value, "a task must be an object")


def test_json_lines_meet_the_params_of_their_job() -> None:
    work = ValidationRequest(
        source=JSONL_WORK.source, run_id=JSONL_WORK.run_id, job_params={"js_render": "true"}
    )
    line = json.dumps({"url": A, "method": "POST", "body": "x"}).encode()
    assert len(accepted(JSONL_WORK, line)) == 1
    expected = (InvalidTask(0, InvalidTaskReason.METHOD_PARAM_CONFLICT, "js_render", line=1),)
    assert refused(work, line).invalid_tasks == expected


@pytest.mark.parametrize("work", [URLS_WORK, csv_work()])
def test_the_limit_on_rows_holds_for_every_kind(work: ValidationRequest) -> None:
    few = with_limits(work, rows=2)
    assert len(accepted(few, f"{A}\n\n{A}\n".encode())) == 2
    assert refused(few, f"{A}\n{A}\n{A}".encode()).detail == (
        "the file holds more than 2 tasks (CONVEYOR_MAX_INPUT_ROWS)"
    )


@settings(database=None)
@given(content=st.binary(max_size=60) | st.text('"\\{}[]:,url\n\r #', max_size=40).map(str.encode))
def test_no_content_is_unforeseen(content: bytes) -> None:
    for work, _ in KINDS:
        frames = answer(work, content, step=3)
        assert getattr(frames[-1], "code", None) is not ErrorCode.INTERNAL


def blocks(line: str, rows: int) -> Iterator[bytes]:
    """A file of numbered lines, made as it is read."""
    for first in range(0, rows, 500):
        yield "".join(line.format(i) for i in range(first, first + 500)).encode()


@pytest.mark.guarantee("G18")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "line", "good"),
    [
        (csv_work(0, 1), "http://a.example/{0},n-{0}\n", True),
        pytest.param(
            csv_work(1), '"x\ny",http://a.example/{0}\n', True, marks=pytest.mark.extended
        ),
        (URLS_WORK, "http://a.example/{0}\n", True),
        pytest.param(
            JSONL_WORK,
            '{{"url":"http://a.example/{0}","external_id":"n-{0}"}}\n',
            True,
            marks=pytest.mark.extended,
        ),
        pytest.param(csv_work(0, 1), "bad-{0},n\n", False, marks=pytest.mark.extended),
    ],
    ids=["csv", "multi-line csv", "urls", "jsonl", "bad csv"],
)
def test_memory_does_not_grow_with_the_file(work: ValidationRequest, line: str, good: bool) -> None:
    peaks = []
    for rows in (12_000, 36_000):
        counted: list[int] = []

        def count(frame: Frame, counted: list[int] = counted) -> None:
            counted.append(getattr(frame, "count", 0))

        expectation: AbstractContextManager[object] = (
            nullcontext() if good else pytest.raises(ConveyorError)
        )
        tracemalloc.start()
        try:
            with expectation:
                read_file(blocks(line, rows), with_limits(work, rows=rows), count)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert sum(counted) == (rows if good else 0)
    assert peaks[1] < 1.1 * peaks[0] + 100_000
    assert peaks[1] < 12_000_000
