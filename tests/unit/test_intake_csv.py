"""CSV files: the tasks read from them, and the errors reported."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.errors import ErrorCode, InvalidTask, InvalidTaskReason
from conveyor.domain.model import TaskSpec
from conveyor.intake.csv_file import MAX_RECORD
from conveyor.intake.frames import ValidationRequest
from tests.unit.intake_lists import accepted, csv_work, refused, with_limits

A, B, C = "http://a.example/", "http://b.example/", "http://c.example/"
PROPERTY = settings(database=None)


def names(count: int) -> bytes:
    """Return `count` good lines of a URL and an external id."""
    return "".join(f"http://a{i}.example/,n-{i}\n" for i in range(count)).encode()


@pytest.mark.parametrize(
    ("work", "content"),
    [
        (csv_work(), f"{A}\n{B}\n"),
        (csv_work(), f"{A}\r\n{B}"),
        (csv_work(), f"\ufeff{A}\n{B}\n"),
        (csv_work(), f'\ufeff"{A}",x,y\n"{B}"\n'),
        (csv_work(), f"\n\r\n{A}\n  \n\n{B}\n\n"),
        (csv_work(1), f'"x\ny, ""z""",{A}\n\n,{B},\n'),
        (csv_work(1, delimiter=";", quote="'"), f"'it''s; x';{A}\n\"a;'{B}'\n"),
        (csv_work(0, delimiter="\t"), f"{A}\tx\n{B}\ty\n"),
        (csv_work("url", header=True), f"id,url\n1,{A}\n2,{B}\n"),
        (csv_work("url", header=True), f'\n \n"url"\r\n{A}\r\n{B}\r\n'),
        (csv_work("ü, \n", header=True), f'\ufeff"ü, \n",x\n{A}\n{B}\n'),
        (csv_work(1, header=True), f"url,url\nx,{A}\nx,{B}\n"),
        (csv_work("b", header=True), f"a,a,b\n1,2,{A}\n1,2,{B}\n"),
    ],
)
def test_what_is_read(work: ValidationRequest, content: str) -> None:
    for step in (1, 7, 65_536):
        assert accepted(work, content.encode(), step=step) == [TaskSpec(A), TaskSpec(B)]


def test_an_external_id_may_be_left_empty() -> None:
    content = f"{A},x-1\n{B},\n{C},x-1\n".encode()
    expected = [TaskSpec(A, "x-1"), TaskSpec(B), TaskSpec(C, "x-1")]
    assert accepted(csv_work(0, 1), content) == expected
    assert accepted(csv_work(0, 1), content + b"http://[::1]/,z\n") == [
        *expected,
        TaskSpec("http://[::1]/", "z"),
    ]


def test_the_same_column_may_be_both() -> None:
    problem = refused(csv_work(0, 0), A.encode()).invalid_tasks
    assert problem == (InvalidTask(0, InvalidTaskReason.INVALID_EXTERNAL_ID, A, 1),)


@pytest.mark.parametrize(
    ("work", "content", "detail"),
    [
        (
            csv_work("link", header=True),
            "id,url\n",
            'the header has no column "link"; it has "id", "url"',
        ),
        (
            csv_work("link", header=True),
            ",".join("abcdefghijkl"),
            'the header has no column "link"; it has "a", "b", "c", "d", "e", "f", "g", "h", "i", '
            '"j", …',
        ),
        (csv_work("url", header=True), "url,x,url\n", 'the header has 2 columns "url"'),
        (
            csv_work(0, "x", header=True),
            "url,x,x\n",
            'the header has 2 columns "x"',
        ),
        (
            csv_work("url"),
            f"{A}\n",
            'the column "url" is named, but the file is read without a header',
        ),
        (csv_work(0, header=True), "", "the file is empty: there is no header"),
        (csv_work(0, header=True), "url\n\n", "the file holds no task"),
        (csv_work(), "", "the file holds no task"),
        (csv_work(), "\n \r\n\n", "the file holds no task"),
        (
            csv_work(0, header=True),
            '\n\n"url\n',
            "the header, which begins at line 3, has a quote that is not closed",
        ),
        (
            csv_work(),
            f'{A}\n\n"x\ny"\n\n"{B}\n{C}\n',
            "record 3, which begins at line 6, has a quote that is not closed",
        ),
        (
            csv_work(),
            f'{A}\n"{B}\n{C},"x"\n',
            "record 2, which begins at line 2, has an unbalanced quote: text follows a closing one",
        ),
        (
            csv_work(0, header=True),
            f'url\n{A}\n"{B}" \n',
            "record 2, which begins at line 3, has an unbalanced quote: text follows a closing one",
        ),
        (
            csv_work(),
            f"{A}\r{B}\n",
            "record 1, which begins at line 1, holds a carriage return that ends no line: end "
            "lines with LF or CRLF",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_place(
    work: ValidationRequest, content: str, detail: str
) -> None:
    for step in (1, 65_536):
        refusal = refused(work, content.encode(), step=step)
        assert (refusal.code, refusal.detail) == (ErrorCode.INVALID_ARGUMENT, detail)
        assert refusal.invalid_tasks == ()


@pytest.mark.parametrize("ahead", [0, 3, 1_500, 5_000])
def test_a_quote_that_is_never_closed_does_not_swallow_the_rest(ahead: int) -> None:
    content = names(ahead) + b'"http://x.example/,y\n' + names(40_000)
    refusal = refused(csv_work(0, 1), content)
    assert refusal.detail == (
        f"record {ahead + 1}, which begins at line {ahead + 1}, is longer than {MAX_RECORD:,} "
        "characters: a quote may not be closed"
    )


def test_a_record_of_many_quoted_lines_is_bounded() -> None:
    content = names(2) + b'"' + b'\n","' * 200_000 + b'"\n'
    expected = (
        f"record 3, which begins at line 3, is longer than {MAX_RECORD:,} characters: a quote may "
        "not be closed"
    )
    assert refused(csv_work(), content).detail == expected
    field = b'"\n' + b"x" * (MAX_RECORD // 4) + b'"'
    just_too_long = names(2) + b",".join([field] * 4) + b"\n"
    assert refused(csv_work(), just_too_long).detail == expected


def test_a_long_record_within_the_bound_is_read() -> None:
    content = b'"' + b"x\n" * 100_000 + f'",{A}\n,{B}\n'.encode()
    assert accepted(csv_work(1), content) == [TaskSpec(A), TaskSpec(B)]


def test_bad_rows_are_listed_with_index_reason_value_and_line() -> None:
    content = f'url,id\n\n{A},"x"\n"{B}",a\n"x\ny",b\n,c\n{A}\nftp://u:secret@h/,d\n{A},e f\n'
    refusal = refused(csv_work("url", "id", header=True), content.encode())
    assert refusal.code is ErrorCode.INVALID_ARGUMENT
    assert refusal.detail == (
        "5 of 7 tasks in the file are invalid; nothing was created; the first is record 3 at line "
        "5: malformed_url (x\\ny)"
    )
    short = "too few columns: 1 of 2"
    assert refusal.invalid_tasks == (
        InvalidTask(2, InvalidTaskReason.MALFORMED_URL, "x\\ny", 5),
        InvalidTask(3, InvalidTaskReason.MALFORMED_URL, "empty url cell", 7),
        InvalidTask(4, InvalidTaskReason.MALFORMED_URL, short, 8, short),
        InvalidTask(5, InvalidTaskReason.UNSUPPORTED_SCHEME, "ftp://***@h/", 9),
        InvalidTask(6, InvalidTaskReason.INVALID_EXTERNAL_ID, "e f", 10),
    )


def test_a_hundred_bad_rows_are_listed_and_all_are_counted() -> None:
    content = names(2_000) + b"x,y\n" * 1_234 + names(10)
    refusal = refused(csv_work(0, 1), content)
    assert refusal.detail == (
        "1234 of 3244 tasks in the file are invalid; nothing was created; the first is record 2001 "
        "at line 2001: malformed_url (x)"
    )
    assert [task.index for task in refusal.invalid_tasks] == list(range(2_000, 2_100))


def test_too_many_rows_are_refused_and_never_cut() -> None:
    work = with_limits(csv_work(0, 1), rows=2_500)
    assert len(accepted(work, names(2_500))) == 2_500
    refusal = refused(work, names(2_501))
    assert refusal.code is ErrorCode.INVALID_ARGUMENT
    assert refusal.detail == "the file holds more than 2,500 tasks (CONVEYOR_MAX_INPUT_ROWS)"
    assert refused(work, b"x,y\n" * 2_501).detail == refusal.detail


CELLS = st.text(st.sampled_from("ab,;'\"\n\r ä\U0001f600"), max_size=6)
RECORDS = st.lists(st.lists(CELLS, min_size=1, max_size=3), min_size=1, max_size=8)


@PROPERTY
@given(
    records=RECORDS,
    dialect=st.sampled_from([(",", '"'), (";", "'"), ("\t", '"')]),
    ending=st.sampled_from(["\n", "\r\n"]),
    step=st.integers(1, 40),
    bom=st.booleans(),
)
def test_what_a_csv_writer_writes_is_read_whatever_the_steps(
    records: list[list[str]], dialect: tuple[str, str], ending: str, step: int, bom: bool
) -> None:
    delimiter, quote = dialect
    out = io.StringIO()
    writer = csv.writer(
        out, delimiter=delimiter, quotechar=quote, lineterminator=ending, quoting=csv.QUOTE_ALL
    )
    # The first record says how many columns there are.
    records = sorted(records, key=len, reverse=True)
    for number, record in enumerate(records):
        writer.writerow([f"http://a.example/{number}", *record])
    content = ("\ufeff" if bom else "") + out.getvalue()
    specs = accepted(csv_work(delimiter=delimiter, quote=quote), content.encode(), step=step)
    assert specs == [TaskSpec(f"http://a.example/{number}") for number in range(len(records))]


@pytest.mark.slow
@PROPERTY
@given(records=RECORDS, bad=st.integers(0, 7), step=st.integers(1, 40))
def test_the_line_of_a_bad_record_is_where_it_begins(
    records: list[list[str]], bad: int, step: int
) -> None:
    bad %= len(records)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    line = 0
    for number, record in enumerate(records):
        if number == bad:
            line = out.getvalue().count("\n") + 1
        writer.writerow([*record, "x"] if number == bad else [f"http://a.example/{number}"])
        if number % 3 == 1:
            out.write("\n")
    refusal = refused(csv_work(), out.getvalue().encode(), step=step)
    assert f"the first is record {bad + 1} at line {line}: " in refusal.detail
    assert [task.index for task in refusal.invalid_tasks] == [bad]
