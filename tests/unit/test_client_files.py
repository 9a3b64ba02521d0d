"""File names for results: portable, apart, inside the directory, whole or absent."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.client.files import MAX_STEM, Stems, extension, portable_stem, replacing

ALLOWED = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


@given(st.text(max_size=300))
def test_a_stem_is_portable_whatever_it_is_made_of(text: str) -> None:
    stem = portable_stem(text)
    assert set(stem) <= ALLOWED
    assert 1 <= len(stem) <= MAX_STEM + 1
    assert not stem.startswith((".", "-"))
    assert not stem.endswith((".", " "))
    windows = PureWindowsPath(stem + ".html")
    assert len(windows.parts) == 1
    assert stem.partition(".")[0].lower() not in {"con", "prn", "aux", "nul", "com1", "lpt9"}


@pytest.mark.parametrize(
    ("text", "stem"),
    [
        ("order-1", "order-1"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("..", "_"),
        ("", "_"),
        ("-rf", "_-rf"),
        (".hidden", "hidden"),
        ("CON", "_CON"),
        ("nul.tar", "_nul.tar"),
        ("com1", "_com1"),
        ("concert", "concert"),
        ("page.html", "page"),
        ("page.HTML", "page"),
        ("v1.2", "v1.2"),
        ("C:\\x\x00y", "C__x_y"),
        ("日本", "__"),
    ],
)
def test_known_stems(text: str, stem: str) -> None:
    assert portable_stem(text) == stem


def test_long_names_that_differ_at_the_end_stay_apart() -> None:
    first, second = portable_stem("a" * 500 + "1"), portable_stem("a" * 500 + "2")
    assert len(first) == len(second) == MAX_STEM
    assert first != second


@given(st.lists(st.sampled_from(["a", "A", "a-2", "A-2", "a.html", "a.json.html", "con", "CON"])))
def test_no_two_files_share_a_name_where_case_is_ignored(texts: list[str]) -> None:
    for suffixes in ([".html"], [".html", ".json"]):
        stems = Stems()
        names = [
            stems.claim(text) + suffixes[number % len(suffixes)]
            for number, text in enumerate(texts)
        ]
        assert len({name.lower() for name in names}) == len(texts)


def test_a_taken_stem_is_numbered_in_order() -> None:
    stems = Stems()
    assert [stems.claim("a"), stems.claim("A"), stems.claim("a")] == ["a", "A-2", "a-3"]


@pytest.mark.parametrize(
    ("result_format", "content_type", "expected"),
    [
        ("html", "text/html; charset=Shift_JIS", ".html"),
        ("html", "Application/PDF", ".pdf"),
        ("html", "text/csv; charset=utf-8", ".csv"),
        ("html", "", ".html"),
        ("html", "application/x-unheard-of", ".html"),
        ("json", "text/html", ".json"),
        ("markdown", "text/html", ".md"),
        ("plaintext", "text/html", ".txt"),
        ("pdf", "text/html", ".pdf"),
        ("hologram", "text/html", ".bin"),
        (None, "image/svg+xml", ".svg"),
    ],
)
def test_extensions(result_format: str | None, content_type: str, expected: str) -> None:
    assert extension(result_format, content_type) == expected


def test_a_file_has_its_name_only_once_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    with replacing(path) as file:
        file.write(b"half")
        assert not path.exists()
    assert path.read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_laid_out_beforehand_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "a.html").symlink_to(outside)
    (directory / ".a.html.part").symlink_to(outside)
    with replacing(directory / "a.html") as file:
        file.write(b"body")
    assert outside.read_bytes() == b"precious"
    assert not (directory / "a.html").is_symlink()
