"""The files that are sent whole, their declared type, and the way to read a CSV file."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import click
import pytest

from conveyor.client import inputs
from conveyor.client.errors import ClientError
from conveyor.client.inputs import file_input, opened
from conveyor.client.options import CsvOptions, FileType, csv_options

NO_CSV = CsvOptions()
CSV = CsvOptions(header=True)


def chosen(
    *arguments: str, file_type: FileType | None = None, csv: CsvOptions = NO_CSV
) -> FileType | None:
    found = file_input(arguments, file_type, csv)
    return None if found is None else found.type


def refusal(*arguments: str, file_type: FileType | None = None, csv: CsvOptions = NO_CSV) -> str:
    with pytest.raises(ClientError) as caught:
        file_input(arguments, file_type, csv)
    return str(caught.value)


def slot(path: Path, csv: CsvOptions = NO_CSV, file_type: FileType | None = None) -> object:
    found = file_input([str(path)], file_type, csv)
    assert found is not None
    with opened(found) as source:
        assert source.size == path.stat().st_size
        return source.slot


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_small_lists_urls_and_pipes_are_read_here(tmp_path: Path) -> None:
    small = written(tmp_path / "list.txt", b"http://a/\n")
    for arguments in ([small], [small, small], ["http://a/x.csv"], ["-"], ["http://a/l.txt.gz"]):
        assert chosen(*arguments) is None


@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "a.tsv", "a.csv.gz"])
def test_a_csv_file_is_known_by_its_name(name: str) -> None:
    assert chosen(name) is FileType.CSV


def test_a_list_of_more_than_4_mib_is_sent_whole_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "LARGE", 20)
    for content, kind in (
        (b"# urls\n\n  http://aaaaaaaa/\n", FileType.URLS),
        (b'\xef\xbb\xbf{"url": "http://a/"}\n', FileType.JSONL),
    ):
        for name in ("list.txt", "list.jsonl", "list.ndjson"):
            large = written(tmp_path / name, content)
            assert chosen(large) is kind
            assert chosen(large, "http://a/") is None
        assert chosen(written(tmp_path / "other", content)) is None
    assert chosen(written(tmp_path / "just.txt", b"http://aaaaaaaaaaaa\n")) is None


def test_a_compressed_list_is_told_by_what_is_in_it(tmp_path: Path) -> None:
    urls = written(tmp_path / "l.txt.gz", gzip.compress(b"http://a/\n"))
    tasks = written(tmp_path / "l.jsonl.gz", gzip.compress(b'{"url": "http://a/"}\n'))
    cut = written(tmp_path / "cut.jsonl.gz", gzip.compress(b'{"url": "http://a/"}\n')[:12])
    assert [chosen(path) for path in (urls, tasks, cut)] == [
        FileType.URLS,
        FileType.JSONL,
        FileType.URLS,
    ]


def test_what_is_said_counts_more_than_the_name() -> None:
    assert chosen("a.csv", file_type=FileType.URLS) is FileType.URLS
    assert chosen("-", file_type=FileType.CSV, csv=CSV) is FileType.CSV


@pytest.mark.parametrize(
    ("arguments", "file_type", "csv", "message"),
    [
        (["a.csv", "http://a/"], None, NO_CSV, "a.csv is sent as a file"),
        (["http://a/", "b", "c.csv"], None, NO_CSV, "c.csv is sent as a file"),
        (["x", "y"], FileType.URLS, NO_CSV, "x is sent as a file"),
        (["http://a/"], FileType.URLS, NO_CSV, "--type is for a file"),
        (["x.gz"], None, NO_CSV, "x.gz does not show its type: add --type"),
        (["x.txt.gz"], None, NO_CSV, "no such file: x.txt.gz"),
        (["x"], None, CSV, "--field, --header, --delimiter and --quote are for CSV"),
        (["x"], FileType.JSONL, CSV, "--field, --header, --delimiter and --quote are for CSV"),
    ],
)
def test_what_does_not_go_together_is_told(
    arguments: list[str], file_type: FileType | None, csv: CsvOptions, message: str
) -> None:
    assert refusal(*arguments, file_type=file_type, csv=csv).startswith(message)


@pytest.mark.parametrize(
    ("content", "csv", "expected"),
    [
        (b"http://a/,x\n", NO_CSV, {"fields": {"url": 0}}),
        (b"id,url\n", CSV, {"fields": {"url": "url"}, "header": True}),
        (b"\xef\xbb\xbfURL ,id\n", CSV, {"fields": {"url": "URL "}, "header": True}),
        (b"id,address\n", CSV, {"fields": {"url": 0}, "header": True}),
        (
            b"'a;b';url\n",
            CsvOptions(header=True, delimiter=";", quote="'"),
            {"fields": {"url": "url"}, "header": True, "delimiter": ";", "quote": "'"},
        ),
        (
            b"a,url\n",
            CsvOptions(url=3, external_id="id", header=True),
            {"fields": {"url": 3, "external_id": "id"}, "header": True},
        ),
    ],
)
def test_the_slot_says_how_the_file_is_read(
    tmp_path: Path, content: bytes, csv: CsvOptions, expected: dict[str, object]
) -> None:
    described = {"delimiter": ",", "quote": '"', "header": False, **expected}
    for path, packed in ((tmp_path / "a.csv", content), (tmp_path / "b.csv.gz", None)):
        path.write_bytes(packed if packed is not None else gzip.compress(content))
        assert slot(path, csv) == {"type": "csv", "csv": described}


def test_tabs_separate_what_is_named_tsv(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"id\turl\n")
    document = slot(path, CSV)
    assert isinstance(document, dict)
    assert document["csv"]["delimiter"] == "\t"
    assert document["csv"]["fields"] == {"url": "url"}
    said = slot(path, CsvOptions(delimiter=";"))
    assert isinstance(said, dict)
    assert said["csv"]["delimiter"] == ";"


def test_lists_need_no_more_than_their_type(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes(b"http://a/\n")
    assert slot(path, file_type=FileType.URLS) == {"type": "urls"}
    assert slot(path, file_type=FileType.JSONL) == {"type": "jsonl"}


def test_standard_input_is_put_aside_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"http://a/\n" * 9)))
    found = file_input(["-"], FileType.URLS, NO_CSV)
    assert found is not None
    with opened(found) as source:
        assert (source.name, source.size) == ("standard input", 90)
        source.file.seek(0)
        assert source.file.read() == b"http://a/\n" * 9
    assert source.file.closed


def test_a_file_that_cannot_be_sent_is_one_line(tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.csv", b"")
    for path, message in (
        (empty, f"{empty} is empty"),
        (str(tmp_path / "no\x1b.csv"), f"no such file: {tmp_path}/no\\x1b.csv"),
        (f"{tmp_path}/", f"cannot read {tmp_path}/: "),
        ("a\0b", "cannot read a\\x00b"),
    ):
        found = file_input([path], FileType.CSV, NO_CSV)
        assert found is not None
        with pytest.raises(ClientError) as caught, opened(found):
            pass
        assert str(caught.value).startswith(message)


def test_fields_are_indexes_or_names_and_a_name_means_a_header() -> None:
    def options(*fields: str, header: bool = False) -> CsvOptions:
        return csv_options(fields, header=header, delimiter=None, quote=None)

    assert options("url=2", "external_id=0") == CsvOptions(url=2, external_id=0)
    assert options("url=link") == CsvOptions(url="link", header=True)
    assert options("external_id=a=b") == CsvOptions(external_id="a=b", header=True)
    assert options("url=2", header=True) == CsvOptions(url=2, header=True)
    assert options("url=²").url == "²"
    for bad in ("url", "=2", "url=", "name=1"):
        with pytest.raises(click.UsageError, match="^--field "):
            options(bad)
