"""File names for results: portable, apart, inside the directory, whole or absent."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.client.directory import MAX_NAME, FileNames, extension, portable, replacing

ALLOWED = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


@pytest.mark.slow
@given(st.text(max_size=300))
def test_a_stem_is_portable_whatever_it_is_made_of(text: str) -> None:
    stem = portable(text)
    assert set(stem) <= ALLOWED
    assert 1 <= len(stem) <= MAX_NAME + 1
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
        ("page.html", "page.html"),
        ("con.html", "_con.html"),
        ("v1.2", "v1.2"),
        ("C:\\x\x00y", "C__x_y"),
        ("日本", "__"),
    ],
)
def test_known_stems(text: str, stem: str) -> None:
    assert portable(text) == stem


def test_long_names_that_differ_at_the_end_stay_apart() -> None:
    first, second = portable("a" * 500 + "1"), portable("a" * 500 + "2")
    assert len(first) == len(second) == MAX_NAME
    assert first != second


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "A", "a-2", "A-2.html", "a.html", "a.json.html", "con", "CON"]),
            st.sampled_from([".html", ".json"]),
        )
    )
)
def test_no_two_files_share_a_name_where_case_is_ignored(wanted: list[tuple[str, str]]) -> None:
    names = FileNames()
    claimed = [names.claim(text) for text, _suffix in wanted]
    given_out = [names.give(name, wanted[at][1]) for at, name in enumerate(claimed)]
    assert len({name.lower() for name in given_out}) == len(wanted)
    assert all(name.endswith(wanted[at][1]) for at, name in enumerate(given_out))


def test_equal_ids_are_numbered_in_the_order_they_are_claimed() -> None:
    names = FileNames()
    claimed = [names.claim(text) for text in ("a", "A", "a", "b.html", "b.html")]
    assert claimed == ["a", "A-2", "a-3", "b.html", "b-2.html"]
    assert [names.give(name, ".html") for name in reversed(claimed)] == [
        "b-2.html",
        "b.html",
        "a-3.html",
        "A-2.html",
        "a.html",
    ]


@pytest.mark.parametrize(
    ("text", "suffix", "name"),
    [
        ("tides.csv", ".csv", "tides.csv"),
        ("tides.CSV", ".csv", "tides.csv"),
        ("tides.csv", ".html", "tides.csv.html"),
        ("v1.2", ".html", "v1.2.html"),
        (".html", ".html", "html.html"),
    ],
)
def test_an_extension_is_not_doubled(text: str, suffix: str, name: str) -> None:
    names = FileNames()
    assert names.give(names.claim(text), suffix) == name


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
