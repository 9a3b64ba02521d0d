"""URLs to scrape, read from arguments, files and pipes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from conveyor.client import inputs
from conveyor.client.check import check_tasks
from conveyor.client.errors import ClientError
from conveyor.client.inputs import hints_about, read_lines, read_tasks
from conveyor.client.submit import JobOptions


def read(content: bytes) -> list[tuple[object, str]]:
    return [(task.body, task.source) for task in read_lines(io.BytesIO(content), "urls.txt")]


def refusal(*arguments: str) -> str:
    with pytest.raises(ClientError) as caught:
        read_tasks(arguments)
    return str(caught.value)


def test_blank_lines_and_comments_do_not_count_and_numbers_stay() -> None:
    assert read(b"# a list\n\nhttp://a/\n   \n  http://b/#c  \n") == [
        ({"url": "http://a/"}, "urls.txt:3"),
        ({"url": "http://b/#c"}, "urls.txt:5"),
    ]


def test_windows_line_ends_and_a_byte_order_mark() -> None:
    assert read(b"\xef\xbb\xbfhttp://a/\r\nhttp://b/\r\n") == [
        ({"url": "http://a/"}, "urls.txt:1"),
        ({"url": "http://b/"}, "urls.txt:2"),
    ]


def test_a_byte_order_mark_counts_for_nothing_where_lists_were_joined() -> None:
    (_, second) = read(b"http://a/\n\xef\xbb\xbfhttp://b/\n")
    assert second[0] == {"url": "http://b/"}


def test_json_tasks_pass_as_they_are() -> None:
    line = b'{"url": "http://a/", "external_id": "x", "new": [1]}\nhttp://b/'
    assert read(line) == [
        ({"url": "http://a/", "external_id": "x", "new": [1]}, "urls.txt:1"),
        ({"url": "http://b/"}, "urls.txt:2"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"http://a/\n{nope}", "urls.txt:2: not a JSON object"),
        (b'{\n  "url": "http://a/"\n}', "urls.txt:1: not a JSON object.*one JSON task a line$"),
        (b"{}", 'urls.txt:1: a JSON task needs a "url"'),
        (b'{"url": 7}', 'urls.txt:1: a JSON task needs a "url"'),
        (b'{"url": "http://a/", "url": "http://b/"}', 'urls.txt:1: not a JSON.*"url" twice'),
        (b'{"url": "http://a/", "metadata": {"a": "1", "a": "2"}}', 'urls.txt:1: .*"a" twice'),
        (b'{"url": "http://a/", "x": 1e999}', "urls.txt:1: .*too large"),
        (b'{"url": "http://a/", "x": NaN}', "urls.txt:1: .*NaN"),
        (b'{"url": "http://a/\\ud800"}', "urls.txt:1: .*half of a surrogate pair"),
        (b'["http://a/"]', "urls.txt:1: a list"),
        (b"http://a/\n\nhttp://\xff/", "urls.txt:3: not UTF-8"),
        (b'{"url": "http://a/", "metadata": ' + b"[" * 100_000, "urls.txt:1: not a JSON object"),
    ],
)
def test_a_bad_line_is_named(content: bytes, message: str) -> None:
    with pytest.raises(ClientError, match="^" + message.replace("[", r"\[")) as caught:
        read(content)
    assert "\n" not in str(caught.value)


def test_urls_and_files_keep_the_order_of_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("http://b/\nhttp://c/\n")
    tasks = read_tasks(["http://a/", str(path), "FTP://d/"])
    assert [task.body["url"] for task in tasks] == [
        "http://a/",
        "http://b/",
        "http://c/",
        "FTP://d/",
    ]
    assert [task.source for task in tasks] == ["argument", f"{path}:1", f"{path}:2", "argument"]


def test_an_argument_is_read_like_a_line() -> None:
    assert [task.body for task in read_tasks(["http://a/1\u200b ", "http://a/2 # x"])] == [
        {"url": "http://a/1"},
        {"url": "http://a/2"},
    ]
    assert "more than one URL" in refusal("http://a/, http://b/")


def test_standard_input_is_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"http://a/\n")))
    (task,) = read_tasks(["-"])
    assert (task.body, task.source) == ({"url": "http://a/"}, "standard input:1")


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    assert refusal(str(tmp_path)).startswith(f"cannot read {tmp_path}: ")
    assert refusal("no\x1b[31mfile").startswith("no such file: no\\x1b[31mfile")
    assert refusal("a\0b").startswith("cannot read a\\x00b")
    assert refusal("http://a/\udcff") == "not a URL: http://a/\\udcff"
    assert refusal(str(empty)).startswith("no task")


def test_the_most_tasks_are_taken_and_one_more_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_TASKS", 3)
    path = tmp_path / "list"
    path.write_text("http://a/\n" * 3)
    assert len(read_tasks([str(path)])) == 3
    assert refusal(str(path), "http://b/").startswith("more than 3 tasks")


A = "https://a.example/"


@pytest.mark.parametrize(
    "lines",
    [
        [f"{A}1,Title", f"{A}2,Other"],
        [f"{A}1,Title,3", f"{A}2,Sch\xf6n,4.50"],
        [f"{A}?q=1,Title", f"{A}?q=2,Other", f"{A}?q=3,Third"],
    ],
)
def test_a_list_that_may_have_columns_is_taken_and_told(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_text("\n".join(lines))
    tasks = read_tasks([str(path)])
    assert [task.body["url"] for task in tasks] == lines
    (hint,) = hints_about(tasks)
    assert hint.startswith(f"{path}: every line has a comma")
    assert hint.endswith("send CSV (--type csv)")
    assert check_tasks(tasks, JobOptions()) == (len(lines), 0, [f"warning: {hint}"])


@pytest.mark.parametrize(
    "lines",
    [
        [f"{A}1,Title"],
        [f"{A}1,Title", f"{A}2"],
        [f"{A}1,Title", f"{A}2,Other,3"],
        [f"{A}politik/0,1518,12,00.html", f"{A}politik/0,1518,13,00.html"],
        [f"{A}@52.5,13.4/map", f"{A}@52.6,13.5/map"],
        [f"{A}?bbox=1,2&z=3", f"{A}?bbox=2,3&z=3"],
    ],
)
def test_other_lists_with_commas_are_taken_in_silence(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_text("\n".join(lines))
    assert hints_about(read_tasks([str(path), f"{A}argument,a", f"{A}argument,b"])) == []
