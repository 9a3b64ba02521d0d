"""The forms of an export, made of rows in memory."""

from __future__ import annotations

import base64
import csv
import io
import json
import random
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from pyarrow import parquet

from conveyor.domain import ids
from conveyor.domain.export_rows import Exported, decoded, export_row, neutral
from conveyor.domain.model import Format, Problem, StoredBody, Task, TaskSpec, TaskStatus
from conveyor.domain.result_index import MOST_ROWS, IndexPage
from conveyor.handlers import export_parquet
from conveyor.handlers.export_parquet import parquet_pieces
from conveyor.handlers.export_writers import CSV_COLUMNS, csv_pieces, jsonl_pieces, zip_pieces
from conveyor.testing.clock import START

RUN_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
PROBLEM = Problem(code="RESP001", title="No content", status=422, detail="=nothing\r\nthere")
MIB = 1 << 20
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def row(
    index: int,
    *bytes_of_body: bytes,
    status: TaskStatus = TaskStatus.SUCCESSFUL,
    content_type: str = "text/html; charset=utf-8",
    body_format: Format = Format.HTML,
    gone: bool = False,
    **spec: Any,
) -> Exported:
    """A row; a successful one with its body, unless that is gone."""
    ended = status is TaskStatus.SUCCESSFUL
    size = sum(map(len, bytes_of_body))
    task = Task(
        run_id=RUN_ID,
        task_id=ids.task_id(RUN_ID, index),
        index=index,
        spec=TaskSpec(**({"url": f"https://site.test/{index}"} | spec)),
        status=status,
        created_at=START,
        updated_at=START,
        result=StoredBody("key", size, content_type, body_format) if ended else None,
        error=PROBLEM if status is TaskStatus.FAILED else None,
    )
    return Exported(task, bytes_of_body if ended and not gone else None)


def rows() -> list[Exported]:
    """One of each kind."""
    return [
        row(0, b"<p>", "é".encode(), external_id="one", metadata={"shop": "north"}),
        row(1, b"\xff\x00", content_type="application/pdf", body_format=Format.PDF),
        row(2, status=TaskStatus.FAILED, external_id="bad"),
        row(3, b"lost", gone=True),
        row(4, status=TaskStatus.PENDING),
        row(5, b"\xe9", content_type="text/plain; charset=latin-1", body_format=Format.PLAINTEXT),
        row(6, b"", content_type="application/json", body_format=Format.JSON, external_id="ONE"),
    ]


STATUSES = ["successful", "successful", "failed", "expired", "pending", "successful", "successful"]


def test_a_zip_holds_every_body_and_tells_of_every_row() -> None:
    archive = zipfile.ZipFile(io.BytesIO(b"".join(zip_pieces(rows()))))

    assert archive.testzip() is None
    second, sixth = ids.task_id(RUN_ID, 1), ids.task_id(RUN_ID, 5)
    names = [
        "one.html",
        f"{second}.pdf",
        f"{sixth}.txt",
        "ONE.json",
        "index.html",
        "manifest.jsonl",
    ]
    assert archive.namelist() == names
    assert archive.read("one.html") == "<p>é".encode()
    assert archive.read(f"{second}.pdf") == b"\xff\x00"
    lines = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
    assert [line["status"] for line in lines] == STATUSES
    assert [line.get("file") for line in lines] == [
        names[0], names[1], None, None, None, names[2], names[3],
    ]  # fmt: skip
    assert lines[0] == {
        "task_id": ids.task_id(RUN_ID, 0),
        "external_id": "one",
        "url": "https://site.test/0",
        "status": "successful",
        "type": "html",
        "file": "one.html",
        "content_type": "text/html; charset=utf-8",
        "size": 5,
        "metadata": {"shop": "north"},
    }
    assert lines[2]["error"] == {
        "code": "RESP001", "title": "No content", "status": 422, "detail": "=nothing\r\nthere",
    }  # fmt: skip
    assert set(lines[3]) == {"task_id", "url", "status"}


def test_the_index_of_a_zip_links_its_files_without_script_or_password() -> None:
    task = row(0, b"<p>", external_id="a-b").task
    spec = msgspec.structs.replace(
        task.spec, url="https://u:secret@site.test/?<script>&amp;", external_id='"><script>'
    )
    hostile = Exported(msgspec.structs.replace(task, spec=spec), (b"<p>",))
    archive = zipfile.ZipFile(io.BytesIO(b"".join(zip_pieces([hostile]))))
    page = archive.read("index.html").decode()
    assert "<script" not in page
    assert "secret" not in page
    assert '<a href="___script_.html">&quot;&gt;&lt;script&gt;</a>' in page
    assert "https://***@site.test/?&lt;script&gt;&amp;amp;" in page
    assert "1 tasks, 1 files" not in page
    assert "1 task, 1 file." in page


def test_the_index_of_many_rows_is_bounded_and_says_so() -> None:
    page = IndexPage()
    exported = export_row(row(0, b"<p>"), file="a.html")
    lines = [page.row(exported) for _ in range(MOST_ROWS + 1)]
    assert lines[-2]
    assert lines[-1] == ""
    assert "10,001 tasks, 10,001 files; the first 10,000 are shown" in page.foot()


def test_a_zip_of_nothing_holds_an_empty_manifest() -> None:
    archive = zipfile.ZipFile(io.BytesIO(b"".join(zip_pieces([]))))
    assert archive.namelist() == ["index.html", "manifest.jsonl"]
    assert archive.read("manifest.jsonl") == b""


def test_a_zip_comes_out_while_rows_come_in() -> None:
    taken = 0

    def many() -> Iterator[Exported]:
        nonlocal taken
        for index in range(1_000):
            taken += 1
            yield row(index, ids.task_id(RUN_ID, index).encode() * 100)

    pieces = zip_pieces(many())
    next(pieces)
    assert taken < 1_000
    pieces.close()


@pytest.mark.guarantee("G18")
@pytest.mark.parametrize(
    "count", [2_000, pytest.param(70_000, marks=(pytest.mark.full, pytest.mark.timeout(600)))]
)
def test_a_zip_of_many_bodies_opens_everywhere(tmp_path: Path, count: int) -> None:
    many = (row(n, b"body %d" % n, external_id=("Page" if n % 2 else "page")) for n in range(count))
    path = tmp_path / "many.zip"
    assert write(path, zip_pieces(many)) < 16 * MIB + 300 * count

    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert len(names) == len({name.lower() for name in names}) == count + 2
        assert archive.read(f"Page ({count}).html") == b"body %d" % (count - 1)
    opens(path)


@pytest.mark.full
@pytest.mark.timeout(1_200)
def test_a_zip_beyond_four_gibibytes_opens_everywhere(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(1 << 20)

    def huge() -> Iterator[Exported]:
        for index in range(90):
            yield row(index, *[noise] * 48)

    path = tmp_path / "huge.zip"
    assert write(path, zip_pieces(huge())) < 16 * MIB
    with zipfile.ZipFile(path) as archive:
        assert sum(info.file_size for info in archive.infolist()) > 4 << 30
        assert archive.testzip() is None
    opens(path)
    path.unlink()  # the latest temporary directories are kept


def write(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a file piece by piece; by how many bytes this process grew meanwhile, at most."""
    before = most = resident_memory()
    with path.open("wb") as file:
        for number, piece in enumerate(pieces):
            file.write(piece)
            if number % 64 == 0:
                most = max(most, resident_memory())
    return most - before


def resident_memory() -> int:
    """Bytes of memory that this process holds."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1_024


def opens(path: Path) -> None:
    """Info-ZIP and, where it is installed, 7-Zip find an archive sound."""
    tested = 0
    for program, *arguments in (("unzip", "-tq"), ("7z", "t"), ("7zz", "t")):
        if shutil.which(program) is None:
            continue
        done = subprocess.run([program, *arguments, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
        tested += 1
    if not tested:
        pytest.skip("neither unzip nor 7z nor 7zz is installed")


def test_jsonl_has_bodies_inside() -> None:
    lines = [json.loads(line) for line in b"".join(jsonl_pieces(rows())).splitlines()]

    assert [line["status"] for line in lines] == STATUSES
    assert [(line.get("body_encoding"), line.get("body")) for line in lines] == [
        ("text", "<p>é"),
        ("base64", base64.b64encode(b"\xff\x00").decode()),
        (None, None),
        (None, None),
        (None, None),
        ("text", "é"),
        ("text", ""),
    ]
    assert all("file" not in line for line in lines)


def test_csv_has_bodies_inside() -> None:
    text = b"".join(csv_pieces(rows())).decode()
    header, *records = csv.reader(io.StringIO(text, newline=""))

    assert header == list(CSV_COLUMNS)
    cells = [dict(zip(header, record, strict=True)) for record in records]
    assert [one["status"] for one in cells] == STATUSES
    assert cells[0]["body"] == "<p>é"
    assert json.loads(cells[0]["metadata"]) == {"shop": "north"}
    assert (cells[1]["body_encoding"], cells[1]["body"]) == ("base64", "/wA=")
    assert (cells[2]["error_code"], cells[2]["error_detail"]) == (
        "RESP001",
        "'=nothing\r\nthere",
    )
    assert text.startswith("task_id,external_id,")
    assert "\r\n" in text


@pytest.mark.parametrize(
    ("moment", "told"),
    [
        (1_700_000_001_500, (2023, 11, 14, 22, 13, 20)),
        (0, (1980, 1, 1, 0, 0, 0)),
    ],
)
def test_a_file_in_an_archive_is_of_the_moment_of_its_row(
    moment: int, told: tuple[int, ...]
) -> None:
    """The archive counts seconds by twos, from 1980 on."""
    made = row(0, b"<p>")
    made = Exported(structs.replace(made.task, updated_at=moment), made.body)
    archive = zipfile.ZipFile(io.BytesIO(b"".join(zip_pieces([made]))))

    assert [info.date_time for info in archive.infolist()] == [told] * 3


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_no_cell_of_a_csv_file_is_a_formula_and_no_text_is_lost(bodies: list[str]) -> None:
    exported = [row(n, text.encode(), metadata={"k": text}) for n, text in enumerate(bodies)]
    text = b"".join(csv_pieces(exported)).decode()
    found = [record[-1] for record in csv.reader(io.StringIO(text, newline=""))][1:]

    assert [cell.removeprefix("'") for cell in found] == [one.removeprefix("'") for one in bodies]
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in found)


@pytest.mark.parametrize(
    "cell",
    [
        *("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"),
        *("\uff1d1", "\uff0b1", "\uff0d1", "\uff20SUM(A1)"),
    ],
)
def test_what_begins_like_a_formula_gets_an_apostrophe(cell: str) -> None:
    assert neutral(cell) == "'" + cell


@pytest.mark.parametrize("cell", ["", "1", "a=b", "'=1", "é"])
def test_other_cells_stay(cell: str) -> None:
    assert neutral(cell) == cell


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        ("é".encode(), "text/html", "é"),
        ("é".encode("cp1251", "replace"), 'text/html; Charset="windows-1251"', "?"),
        ("日本".encode("shift_jis"), "text/html; charset=Shift_JIS", "日本"),
        (b"\xff", "text/html", None),
        (b"\xff", "text/html; charset=utf-8", None),
        (b"a", "text/html; charset=no-such-charset", None),
        (b"a", "text/html; charset=idna", None),
        (b"a", "text/html; charset=unicode_escape", None),
        (b"a", "text/html; charset=base64", None),
        (b"a", "text/html; charset=undefined", None),
    ],
)
def test_a_body_is_text_under_its_charset_or_not_at_all(
    body: bytes, content_type: str, text: str | None
) -> None:
    assert decoded(body, content_type) == text


def test_parquet_keeps_bodies_as_they_are() -> None:
    data = b"".join(parquet_pieces(rows()))
    table = parquet.read_table(pyarrow.BufferReader(data))

    assert table.column("status").to_pylist() == STATUSES
    bodies = table.column("body").to_pylist()
    assert bodies == ["<p>é".encode(), b"\xff\x00", None, None, None, b"\xe9", b""]
    assert table.column("error_code").to_pylist()[2] == "RESP001"
    assert table.column("size").to_pylist()[:4] == [5, 2, None, None]


def test_parquet_comes_out_in_bounded_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_parquet, "GROUP_ROWS", 10)
    pieces = list(parquet_pieces(row(n, b"body") for n in range(95)))

    file = parquet.ParquetFile(pyarrow.BufferReader(b"".join(pieces)))
    assert file.metadata.num_row_groups == 10
    assert file.metadata.num_rows == 95
    assert len([piece for piece in pieces if piece]) == 11


def test_parquet_of_nothing_is_a_table() -> None:
    table = parquet.read_table(pyarrow.BufferReader(b"".join(parquet_pieces([]))))
    assert table.num_rows == 0
