"""Lists as people's tools write them: taken as meant, or refused with the hint that mends them."""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conveyor.client.check import check_tasks
from conveyor.client.errors import ClientError
from conveyor.client.inputs import file_input, opened, read_lines
from conveyor.client.options import CsvOptions, FileType
from conveyor.client.rewriting import Reading
from conveyor.client.submit import JobOptions
from conveyor.domain import input_spec
from conveyor.domain.model import TaskSpec
from conveyor.intake.frames import Csv, Done, ListSource, Refusal, ValidationRequest
from tests.unit.intake_lists import RUN, answer, rows_of

A, B = "http://t.test/1", "http://t.test/2"
TWO = [A, B]
HEADED = CsvOptions(header=True)
USUAL, AS_IT_IS = CsvOptions(), Reading()


def submitted(
    content: bytes,
    kind: FileType = FileType.CSV,
    csv_options: CsvOptions = USUAL,
    reading: Reading = AS_IT_IS,
    *,
    directory: Path,
) -> list[TaskSpec] | str:
    """The tasks that a file gets from the command line through the server, or why it is refused."""
    path = directory / "list"
    path.write_bytes(content)
    try:
        chosen = file_input([str(path)], kind, csv_options, reading)
        assert chosen is not None
        with opened(chosen) as source:
            source.file.seek(0)
            sent, slot = source.file.read(), source.slot
    except ClientError as error:
        return str(error)
    spec = input_spec.parse_input(slot).csv
    work = ValidationRequest(
        source=ListSource(kind.value),
        run_id=RUN,
        csv=None if spec is None else Csv(**{f: getattr(spec, f) for f in spec.__struct_fields__}),
    )
    frames = answer(work, sent)
    last = frames[-1]
    if isinstance(last, Refusal):
        details = [bad.detail for bad in last.invalid_tasks if bad.detail]
        return " | ".join([last.detail, *details])
    assert isinstance(last, Done)
    return rows_of(frames)


def urls(found: list[TaskSpec] | str) -> list[str] | str:
    return found if isinstance(found, str) else [spec.url for spec in found]


@dataclass(frozen=True)
class Shape:
    """A list, how it is submitted, and its URLs or a part of the refusal."""

    content: str | bytes
    right: list[str] | str
    options: CsvOptions = CsvOptions()
    reading: Reading = Reading()
    kind: FileType = FileType.CSV


def lines(content: str | bytes, right: list[str] | str, **reading: Any) -> Shape:
    """A list with a URL on each line."""
    return Shape(content, right, reading=Reading(**reading), kind=FileType.URLS)


WITH_TABS = f"url\tref\r\n{A}\ta\r\n{B}\tb\r\n"
SHAPES = {
    # columns that the comma does not separate
    "semicolons under a header": Shape(f"url;ref\n{A};a\n", "--delimiter ';'", HEADED),
    "semicolons under a named header": Shape(
        f"url;ref\n{A};a\n", "--delimiter ';'", CsvOptions(url="url", header=True)
    ),
    "semicolons without a header": Shape(f"{A};a\n{B};b\n", "--delimiter ';'"),
    "pipes under a header": Shape(f"url|ref\n{A}|a\n", "--delimiter '|'", HEADED),
    "pipes without a header": Shape(f"{A}|a\n", "--delimiter '|'"),
    "tabs under a header": Shape(WITH_TABS, "--delimiter '\\t'", HEADED),
    "tabs without a header": Shape(f"{A}\ta\n{B}\tb\n", "--delimiter '\\t'"),
    "tabs, named": Shape(WITH_TABS, TWO, CsvOptions(header=True, delimiter="\t")),
    "a semicolon in some URLs": Shape(f"{A};v=1\n{B}\n", [f"{A};v=1", B]),
    "a semicolon in URLs under a header": Shape(f"url\n{A};v=1\n", [f"{A};v=1"], HEADED),
    "semicolons in the rows of a one-word header": Shape(
        f"url\n{A};x\n{B};y\n", "--delimiter ';'", HEADED
    ),
    "pipes in the rows of a header that is not announced": Shape(
        f"\nurl\n\n{A}|x\n{B}|y\n", "--delimiter '|'"
    ),
    "pipes behind blank lines": Shape(f"\n\n{A}|x\n", "--delimiter '|'"),
    # more columns than there are
    "a comma in a cell": Shape(
        f"id,url\n1,{A}?q=red,green\n2,{B}\n", "3 columns, the header has 2: quote a cell", HEADED
    ),
    "a comma in the only column": Shape(f"url\n{A}?q=red,green\n", "2 columns, the header has 1"),
    "a comma in a cell without a header": Shape(
        f"\n{A},x\n{B},x,y\n", "3 columns, the first record has 2: quote a cell"
    ),
    "a comma in a quoted cell": Shape(f'id,url\n1,"{A}?q=a,b"\n', [f"{A}?q=a,b"], HEADED),
    "blank cells at the ends": Shape(f"id,url\n1,{A},\n2,{B}, ,\t\n", TWO, HEADED),
    # what Excel writes
    "sep= and semicolons": Shape(f"sep=;\r\n{A};a\r\n{B};b\r\n", TWO),
    "sep= and a header": Shape(f"sep=;\r\nref;url\r\na;{A}\r\nb;{B}\r\n", TWO, HEADED),
    "sep= in quotes": Shape(f'"sep=;"\r\n{A};a\r\n{B};b\r\n', TWO),
    "sep= with a mark": Shape(f"\ufeffsep=\t\r\n{A}\ta\r\n{B}\tb\r\n", TWO),
    "rows of separators": Shape(f"url,ref\r\n{A},a\r\n,\r\n , \r\n{B},b\r\n,,,\r\n", TWO, HEADED),
    "Unicode text without a hint": Shape(WITH_TABS.encode("utf-16"), "--encoding utf-16", HEADED),
    "Unicode text": Shape(
        WITH_TABS.encode("utf-16"),
        TWO,
        CsvOptions(header=True, delimiter="\t"),
        Reading(encoding="utf-16"),
    ),
    "UTF-16 without a mark": Shape(f"{A}\n".encode("utf-16-be"), "--encoding utf-16-be"),
    "a Windows code page without a hint": Shape(f"{A},Zoë\n".encode("cp1252"), "--encoding"),
    "a Windows code page": Shape(
        f"{A}?é\n{B}\n".encode("cp1252"), [f"{A}?é", B], reading=Reading(encoding="cp1252")
    ),
    "a packed code page": Shape(
        gzip.compress(f"{A}?é\n".encode("cp1252")), [f"{A}?é"], reading=Reading(encoding="cp1252")
    ),
    "another encoding than named": Shape(
        f"{A}?é\n".encode("cp1252"), "is not utf-8", reading=Reading(encoding="utf-8")
    ),
    "UTF-8 with a mark": Shape(f"\ufeffurl\r\n{A}\r\n{B}\r\n", TWO, HEADED),
    # cells
    "a blank at the end of a cell": Shape(f'"{A} "\n" {B}"\n', TWO),
    "blanks around separators": Shape(f"a , {A} , x\nb ,{B}\t,y\n", TWO, CsvOptions(url=1)),
    "a quote after a blank": Shape(f'a, "{A}"\nb, "{B}"\n', TWO, CsvOptions(url=1)),
    "invisible ends of cells": Shape(f"\u200b{A}\xa0,x\n{B}\ufeff,y\n", TWO),
    "line breaks at the end of a cell": Shape(f'"{A}\n",x\n"{B}\r\n ",y\n', TWO),
    "a line break in another cell": Shape(f'"a\nb",{A}\n"c",{B}\n', TWO, CsvOptions(url=1)),
    "a line break in a URL": Shape('"http://t.test/\n1"\n', "malformed_url"),
    "two URLs in the lines of a cell": Shape(f'"{A}\n{B}",x\n', "more than one URL"),
    "a formula": Shape(f'"=HYPERLINK(""{A}"")"\n', "something stands before the URL"),
    "a formula of text": Shape(f'"=""{A}"""\n', "something stands before the URL"),
    "an apostrophe against formulas": Shape(f"'{A}\n", "something stands before the URL"),
    "another quote than the usual": Shape(f"'{A}',x\n", "--quote"),
    "cells of nothing but quotes": Shape(f'"",""\n{A},x\n"",\n', [A]),
    "several URLs in a cell": Shape(f'"{A}, {B}"\n', "more than one URL"),
    "a note in a cell": Shape(f"{A} # note\n", "a note follows the URL"),
    "an escaped separator": Shape(f"{A}\\,2,x\n", "the backslash escapes nothing"),
    "an escaped quote": Shape(f'{A}?\\"a\\",x\n', "the backslash escapes nothing"),
    "text behind the URL of a cell": Shape(f"{A} - a page,x\n", "a blank is within"),
    "a bare URL behind the URL of a cell": Shape(f'"{A},www.t.test/2"\n', "more than one URL"),
    # headers
    "a header in another case": Shape(
        f"id,url\n1,{A}\n2,{B}\n", TWO, CsvOptions("URL", header=True)
    ),
    "a header that is not announced": Shape(f"id,Url\n1,{A}\n2,{B}\n", TWO),
    "two headers in other cases": Shape(
        f"Url,URL\n{A},{B}\n", 'has 2 columns "url"', CsvOptions("url", header=True)
    ),
    "the right case of two": Shape(f"Url,url\n{A},{B}\n", [B], CsvOptions("url", header=True)),
    "blanks around a header": Shape(
        f"id, url \n1,{A}\n2,{B}\n", TWO, CsvOptions("url", header=True)
    ),
    # lists of URLs
    "two URLs on a line": lines(f"{A}, {B}\n", "more than one URL"),
    "two URLs after a comma": lines(f"{A},{B}\n", "more than one URL"),
    "two URLs after a blank": lines(f"{B}\n{A} {B}\n", "more than one URL"),
    "two URLs after a tab": lines(f"{A}\t{B}\n", "more than one URL"),
    "a URL in a URL": lines(
        f"http://a.test/{A}\nhttp://a.test/?u={B}\n",
        [f"http://a.test/{A}", f"http://a.test/?u={B}"],
    ),
    "a note": lines(f"{A} # note, see http://x.test/\n{B}\t#\n", TWO),
    "a fragment": lines(f"{A}#a\n{B}\n", [f"{A}#a", B]),
    "invisible ends of lines": lines(f"\ufeff\u2060{A}\u200b\n{B}\xa0 \r\n", TWO),
    "lists with marks, joined": lines(f"{A}\n\ufeff{B}\n", TWO),
    "carriage returns": lines(f"{A}\r{B}\r", "end lines with LF or CR LF"),
    "carriage returns in a table": Shape(f"url,ref\r{A},a\r", "end lines with LF or CRLF", HEADED),
    "an address of another kind behind it": lines(f"{A},ftp://t.test/2\n", "more than one URL"),
    "commas at the ends": lines(f"{A},\n\n# note\n{B},\n", 'every line ends in ","'),
    "semicolons at the ends": lines(f"{A};\n{B};\n", 'every line ends in ";"'),
    "a comma at one end": lines(f"{A},\n{B}\n", [f"{A},", B]),
    "quotes around": lines(f'"{A}"\n', "something stands before the URL"),
    "angle brackets around": lines(f"<{A}>\n", "something stands before the URL"),
    "a number before": lines(f"1. {A}\n2. {B}\n", "something stands before the URL"),
    "a bullet before": lines(f"- {A}\n", "something stands before the URL"),
    "a link of Markdown": lines(f"[a]({A})\n", "something stands before the URL"),
    "columns of tabs": lines(f"{A}\ta\n", "--type csv --delimiter '\\t'"),
    "a JSON task": lines(f'{A}\n{{"url": "{B}"}}\n', "--type jsonl"),
    "form feeds at the ends": lines(f"\x0c{A}\x0b\n{B}\x0c\n", TWO),
    "UTF-16": lines(f"{A}\n{B}\n".encode("utf-16"), TWO, encoding="utf-16"),
    # text behind a URL
    "a title": lines(f"{B}\n{A} - a page\n", "a blank is within"),
    "brackets behind it": lines(f"{A} (dead)\n", "a blank is within"),
    "slashes for a note": lines(f"{A} // note\n", "a blank is within"),
    "a no-break space": lines(f"{A}\xa0page\n", "a blank is within"),
    "www after a blank": lines(f"{A} www.t.test/2\n", "more than one URL"),
    "www after a comma": lines(f"{B}\n{A},www.t.test/2\n", "more than one URL"),
    "www after a comma behind a usual host": lines(
        "http://a.example/1,www.t.test/2\n", "more than one URL"
    ),
    "a URL in square brackets": lines(f"{A} [{B}]\n", "more than one URL"),
    "a URL in curly quotes": lines(f"{A} “{B}”\n", "more than one URL"),
    "a full-width comma": lines(f"{A}，{B}\n", "more than one URL"),
    "an ideographic comma": lines(f"{A}、{B}\n", "more than one URL"),
    "a full-width semicolon": lines(f"{A}；{B}\n", "more than one URL"),
    "a space of no width": lines(f"{A}\u200b{B}\n", "more than one URL"),
    "HTML between": lines(f"{A}<br>{B}\n", "more than one URL"),
    "nothing between": lines(f"{A}{B}\n", "more than one URL"),
    "letters between": lines(f"{A}x{B}\n", "more than one URL"),
    "a scheme twice": lines("https://https://t.test/\n", "the scheme is there twice"),
    "a scheme twice with one colon": lines("http://https//t.test/\n", "the scheme is there twice"),
    "URLs in URLs": lines(
        f"http://web.test/web/2020/{A}\nhttp://a.test/go?u%3D{A}&v={B}\nhttp://a.test/x:{A}\n"
        f"http://a.test/?{A}#{B}\nhttp://a.test/crop({A})\nhttp://http/x\n",
        [
            f"http://web.test/web/2020/{A}",
            f"http://a.test/go?u%3D{A}&v={B}",
            f"http://a.test/x:{A}",
            f"http://a.test/?{A}#{B}",
            f"http://a.test/crop({A})",
            "http://http/x",
        ],
    ),
    "marks within words": lines(
        "http://t.test/\u0645\u06cc\u200c\u062e\n", ["http://t.test/\u0645\u06cc\u200c\u062e"]
    ),
    # bare hosts
    "a bare host": lines("t.test/1\n", "malformed_url"),
    "bare hosts": lines(
        f"t.test/1\n//t.test:8080/2 # note\n\n#t.test/3\n{A}\nftp.test/4\n",
        ["https://t.test/1", "https://t.test:8080/2", A, "https://ftp.test/4"],
        scheme="https",
    ),
    "what is no host": lines("mailto:a@t.test\n", "unsupported_scheme", scheme="https"),
    "more about bare hosts": lines(
        "localhost:9480/x?q=a,b\nbücher.test\nt.test/@user;v=1 # see a.test\n127.0.0.1/#a\n",
        [
            "https://localhost:9480/x?q=a,b",
            "https://bücher.test",
            "https://t.test/@user;v=1",
            "https://127.0.0.1/#a",
        ],
        scheme="https",
    ),
    **{
        f"no bare host: {text}": lines(f"t.test/1\n{text}\n", hint, scheme="https")
        for text, hint in {
            "127.0.0.1:9480/x, 127.0.0.1:9481/y": "more than one host",
            "a.test;b.test": "more than one host",
            "a.test,b.test": "more than one host",
            "a.test/x,b.test/y": "more than one host",
            "a.test/x | b.test": "more than one host",
            "a.test/x b.test": "more than one host",
            '"a.test/x"': "something stands before the host",
            "'a.test/x'": "something stands before the host",
            "(a.test/x)": "something stands before the host",
            "joe@a.test": "something stands before the host",
            "a.test/x - a page": "a blank is within",
            "a.test page": "malformed_url",
        }.items()
    },
    "several bare hosts in a cell": Shape(
        'id,url\n1,"a.test,b.test"\n', "more than one host", reading=Reading(scheme="https")
    ),
    "a quoted bare host in a cell": Shape(
        "id,url\n1,'a.test/x'\n",
        "something stands before the host",
        reading=Reading(scheme="https"),
    ),
    "bare hosts in a table": Shape(
        f"id;url\n1;'t.test/1;a'\n;\n2; {A} \n",
        ["http://t.test/1;a", A],
        CsvOptions("URL", delimiter=";", quote="'", header=True),
        Reading(scheme="http"),
    ),
    "bare hosts of Excel": Shape(
        "sep=;\r\nt.test/1;a\r\n", ["https://t.test/1"], reading=Reading(scheme="https")
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_taken_as_meant_or_refused_with_the_hint(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    content = shape.content.encode() if isinstance(shape.content, str) else shape.content

    found = urls(submitted(content, shape.kind, shape.options, shape.reading, directory=tmp_path))

    if isinstance(shape.right, list):
        assert found == shape.right
    else:
        assert isinstance(found, str), found
        assert shape.right in found


@pytest.mark.parametrize(
    "name", [name for name, shape in SHAPES.items() if shape.kind is FileType.URLS]
)
def test_a_short_list_is_read_alike(name: str) -> None:
    shape = SHAPES[name]
    content = shape.content.encode() if isinstance(shape.content, str) else shape.content
    try:
        found: list[str] | str = [
            task.body["url"] for task in read_lines(io.BytesIO(content), "list", shape.reading)
        ]
    except ClientError as error:
        found = str(error)

    if isinstance(shape.right, list):
        assert found == shape.right
    elif any(
        hint in shape.right
        for hint in ("more than", "every line", "stands before", "blank", "twice")
    ):
        assert shape.right in found


@pytest.mark.parametrize(
    ("content", "hint"),
    [(f"{A}\n".encode("utf-16"), "--encoding utf-16"), (b"http://t.test/\xe9\n", "--encoding")],
)
def test_a_short_list_that_is_not_utf_8_gets_the_hint(content: bytes, hint: str) -> None:
    with pytest.raises(ClientError, match=hint):
        list(read_lines(io.BytesIO(content), "list"))


def test_an_external_id_is_cut_like_a_url(tmp_path: Path) -> None:
    options = CsvOptions(url=0, external_id=1)
    found = submitted(f"{A}, a \n{B},\xa0\n".encode(), csv_options=options, directory=tmp_path)

    assert found == [TaskSpec(A, "a"), TaskSpec(B)]


# -- workbooks --


def workbook(path: Path, *sheets: list[list[str | int | Formula]]) -> Path:
    """Write the parts of a workbook that readers need."""
    kind = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    numbers = range(1, len(sheets) + 1)
    listed = "".join(f'<sheet name="S{n}" sheetId="{n}" r:id="r{n}"/>' for n in numbers)
    targets = "".join(
        f'<Relationship Id="r{n}" Type="{relations}/worksheet" Target="worksheets/s{n}.xml"/>'
        for n in numbers
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{package}"><Relationship Id="r1" '
            f'Type="{relations}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        )
        file.writestr(
            "xl/workbook.xml",
            f'<workbook xmlns="{kind}" xmlns:r="{relations}"><sheets>{listed}</sheets></workbook>',
        )
        file.writestr(
            "xl/_rels/workbook.xml.rels",
            f'<Relationships xmlns="{package}">{targets}</Relationships>',
        )
        for number, rows in enumerate(sheets, start=1):
            body = "".join(f"<row>{''.join(map(_cell, row))}</row>" for row in rows)
            file.writestr(
                f"xl/worksheets/s{number}.xml",
                f'<worksheet xmlns="{kind}"><sheetData>{body}</sheetData></worksheet>',
            )
    return path


@dataclass(frozen=True)
class Formula:
    """A cell with a formula, and what it gave when the workbook was saved."""

    text: str
    value: str


def _cell(content: str | int | Formula) -> str:
    if isinstance(content, Formula):
        formula, value = escape(content.text), escape(content.value)
        return f'<c t="str"><f>{formula}</f><v>{value}</v></c>'
    if isinstance(content, int):
        return f"<c><v>{content}</v></c>"
    return f'<c t="inlineStr"><is><t xml:space="preserve">{escape(content)}</t></is></c>'


def read_workbook(path: Path, **options: Any) -> list[TaskSpec] | str:
    """The tasks that a workbook gets, or why it is refused."""
    try:
        chosen = file_input([str(path)], None, CsvOptions(**options))
        assert chosen is not None
        with opened(chosen) as source:
            source.file.seek(0)
            content = source.file.read()
            spec = input_spec.parse_input(source.slot).csv
    except ClientError as error:
        return str(error)
    assert spec is not None
    work = ValidationRequest(
        source=ListSource.CSV,
        run_id=RUN,
        csv=Csv(**{f: getattr(spec, f) for f in spec.__struct_fields__}),
    )
    return rows_of(answer(work, content))


def test_a_workbook_is_read_as_csv(tmp_path: Path) -> None:
    rows: list[list[str | int | Formula]] = [["id", "URL"], [7, f" {A} "], ["", ""], ['b"c,d', B]]
    path = workbook(tmp_path / "list.XLSX", [], rows, [[""]])

    assert urls(read_workbook(path)) == TWO
    assert urls(read_workbook(path, url="url", header=True)) == TWO
    named = read_workbook(workbook(tmp_path / "ids.xlsx", rows[:2]), external_id="id", header=True)
    assert named == [TaskSpec(A, "7")]


def test_a_formula_of_a_workbook_is_what_it_gave(tmp_path: Path) -> None:
    rows: list[list[str | int | Formula]] = [[Formula(f'HYPERLINK("{B}","x")', A)], [f"{B}\n"]]

    assert urls(read_workbook(workbook(tmp_path / "list.xlsm", rows))) == TWO


def placed(path: Path, cells: str) -> Path:
    """A workbook with cells that say where they are, as Excel writes them."""
    workbook(path, [["x"]])
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name).decode() for name in file.namelist()}
    name = "xl/worksheets/s1.xml"
    start, end = parts[name].index("<row>"), parts[name].index("</sheetData>")
    parts[name] = parts[name][:start] + cells + parts[name][end:]
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return path


def text_cell(place: str, text: str) -> str:
    return f'<c r="{place}" t="inlineStr"><is><t>{text}</t></is></c>'


@pytest.mark.parametrize("far", ["XFD1048576", "XFD2000", "AAA100000"])
def test_a_cell_far_from_the_others_refuses_a_workbook_in_one_line(
    tmp_path: Path, far: str
) -> None:
    row = "".join(filter(str.isdigit, far))
    cells = (
        f'<row r="1">{text_cell("A1", A)}</row><row r="{row}"><c s="1" r="{far}"><v>1</v></c></row>'
    )
    found = read_workbook(placed(tmp_path / "list.xlsx", cells))

    assert isinstance(found, str)
    assert "has cells far from the others" in found
    assert "\n" not in found


def test_styled_cells_without_content_do_not_count(tmp_path: Path) -> None:
    cells = (
        f'<row r="2">{text_cell("A2", A)}</row><row r="3">{text_cell("A3", B)}'
        '<c r="XFD3" s="1"/></row><row r="1048576"><c r="XFD1048576" s="1"/></row>'
    )
    assert urls(read_workbook(placed(tmp_path / "list.xlsx", cells))) == TWO


def test_an_error_of_a_workbook_is_a_bad_task(tmp_path: Path) -> None:
    cells = (
        f'<row r="1">{text_cell("A1", A)}</row>'
        '<row r="2"><c r="A2" s="1" t="e"><f>NA()</f><v>#N/A</v></c></row>'
        f'<row r="3">{text_cell("A3", B)}</row>'
    )
    chosen = file_input([str(placed(tmp_path / "list.xlsx", cells))], None, CsvOptions())
    assert chosen is not None

    with opened(chosen) as source:
        number, skipped, said = check_tasks(source, JobOptions(skip_invalid=True))

    assert (number, skipped) == (2, 1)
    assert "record 2 at line 2: #N/A" in said[0]


@pytest.mark.parametrize("suffix", ["xls", "XLSB", "ods"])
def test_another_kind_of_workbook_gets_the_hint(tmp_path: Path, suffix: str) -> None:
    assert "save it as .xlsx or CSV" in str(read_workbook(tmp_path / f"list.{suffix}"))


def test_a_workbook_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "list.xlsx"
    path.write_bytes(b"PK but no zip")
    assert "is not a workbook that can be read" in str(read_workbook(path))
    workbook(path, [[A]], [[B]])
    assert "has 2 sheets with content: keep the one" in str(read_workbook(path))
    assert "a workbook has none" in str(read_workbook(path, delimiter=";"))
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    assert "needs the extra xlsx" in str(read_workbook(path))


# -- in every dialect, encoding and line ending --

ENCODINGS = [
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "cp1252",
    "latin-1",
]
_paths = st.text(
    st.characters(codec="latin-1", categories=["L", "N", "P", "S"], exclude_characters="\\"),
    max_size=8,
)
_others = st.text(
    st.characters(codec="latin-1", categories=["L", "N", "P", "S", "Zs"]) | st.just("\n"),
    max_size=6,
)
_rows = st.lists(st.tuples(_others, _paths.map("http://t.test/".__add__)), min_size=1, max_size=4)


@dataclass(frozen=True)
class Written:
    """A table as Python's csv module writes it."""

    rows: list[tuple[str, str]]
    delimiter: str = ","
    quote: str = '"'
    quoting: Literal[0, 1, 2, 3] = csv.QUOTE_MINIMAL
    end: str = "\n"
    escape: str | None = None
    doubled: bool = True
    header: bool = False

    def text(self) -> str:
        """Write it. Raises csv.Error where the dialect cannot hold it."""
        out = io.StringIO(newline="")
        writer = csv.writer(
            out,
            delimiter=self.delimiter,
            quotechar=self.quote,
            quoting=self.quoting,
            lineterminator=self.end,
            escapechar=self.escape,
            doublequote=self.doubled,
        )
        writer.writerows([("note", "url"), *self.rows] if self.header else self.rows)
        return out.getvalue()


def is_also_utf_8(content: bytes, meant: str) -> bool:
    """Tell whether bytes of a code page are UTF-8 of another text, which nobody can know."""
    try:
        return content.decode("utf-8-sig") not in (meant, meant.removeprefix("\ufeff"))
    except UnicodeDecodeError:
        return False


_written = st.builds(
    Written,
    rows=_rows,
    delimiter=st.sampled_from([",", ";", "\t", "|", " ", ":"]),
    quote=st.sampled_from(['"', "'"]),
    quoting=st.sampled_from(
        [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC, csv.QUOTE_NONE]
    ),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    escape=st.sampled_from([None, "\\"]),
    doubled=st.booleans(),
    header=st.booleans(),
)


@pytest.mark.slow
@settings(database=None, deadline=None, max_examples=400)
@example(Written([("", A), ("", B)], ";", end="\r", header=True), "utf-8", False)
@given(_written, st.sampled_from(ENCODINGS), st.booleans())
def test_what_the_csv_module_writes_is_read_as_meant_or_refused(
    tmp_path_factory: pytest.TempPathFactory, written: Written, encoding: str, told: bool
) -> None:
    try:
        content = written.text().encode(encoding)
    except csv.Error:
        return
    if not told and is_also_utf_8(content, written.text()):
        return
    directory, meant = tmp_path_factory.getbasetemp(), [url for _, url in written.rows]
    reading = Reading(encoding=encoding if told else None)
    named = CsvOptions(1, None, written.delimiter, written.quote, written.header)
    # With another quote than the file's, lines may join to records that are as good as any.
    unnamed = CsvOptions("URL" if written.header else 1, quote=written.quote, header=written.header)

    for options in (named, unnamed):
        found = urls(submitted(content, csv_options=options, reading=reading, directory=directory))

        assert isinstance(found, str) or found == meant
        is_usual = written.quoting == csv.QUOTE_ALL and written.doubled and written.end != "\r"
        if options is named and told and is_usual:
            assert found == meant
