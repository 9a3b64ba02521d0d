"""Names of files in an archive are unique and portable for any ids."""

from __future__ import annotations

import re
import tracemalloc
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import ids
from conveyor.domain.export_rows import EXTENSIONS, MANIFEST, ArchiveNames, UseCounts
from conveyor.domain.model import Format

RUN_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{n}" for port in ("com", "lpt") for n in range(10)
}

awkward = st.sampled_from(
    [
        "a",
        "A",
        "a.",
        ".a",
        "..",
        "-a",
        "CON",
        "con.tar",
        "Aux",
        "manifest",
        "manifest.jsonl",
        "a (2)",
    ]
    + [ids.task_id(RUN_ID, index) for index in range(3)]
    + [ids.task_id(RUN_ID, index).lower() for index in range(3)]
)
external_ids = st.one_of(
    st.none(), awkward, st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True)
)


def named(external: list[str | None], extension: str = "html") -> list[str]:
    """The names of rows with these external ids."""
    names = ArchiveNames()
    return [
        names.name(ids.task_id(RUN_ID, index), external_id, extension)
        for index, external_id in enumerate(external)
    ]


@pytest.mark.slow
@given(st.lists(st.one_of(external_ids, st.text(max_size=40)), max_size=40))
def test_names_are_unique_and_portable(external: list[str | None]) -> None:
    found = named(external)

    folded = [unicodedata.normalize("NFKC", name).casefold() for name in found]
    assert len({*folded, MANIFEST}) == len(found) + 1
    for name in found:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._ ()-]*[a-z]", name), name
        assert name.partition(".")[0].strip().lower() not in DEVICES
        assert len(name) <= 160
    assert named(external) == found


@pytest.mark.parametrize(
    ("external_id", "name"),
    [
        ("order-1.v2", "order-1.v2.html"),
        ("01K9ZX8J5T2M4N6P8Q0R2S4T6V", "01K9ZX8J5T2M4N6P8Q0R2S4T6V.html"),
        ("nul", "_nul.html"),
        ("CON.tar", "_CON.tar.html"),
        ("console", "console.html"),
        ("com1", "_com1.html"),
        (".hidden", "_.hidden.html"),
        ("ends.", "ends.html"),
        ("...", "_.html"),
        ("-rf", "_-rf.html"),
    ],
)
def test_an_external_id_stays_as_it_is_where_that_is_portable(external_id: str, name: str) -> None:
    assert named([external_id]) == [name]


def test_rows_without_an_external_id_are_named_by_their_task() -> None:
    first, second = named([None, None])
    assert [first, second] == [f"{ids.task_id(RUN_ID, index)}.html" for index in range(2)]


def test_a_name_that_is_taken_gets_a_number_in_submission_order() -> None:
    assert named(["a", "A", "b", "a"]) == ["a.html", "A (2).html", "b.html", "a (3).html"]


def test_an_external_id_does_not_take_the_name_of_another_task() -> None:
    later = ids.task_id(RUN_ID, 1)
    assert named([later.lower(), None]) == [f"_{later.lower()}.html", f"{later}.html"]


def test_task_ids_beyond_those_that_need_no_memory_are_unique_too() -> None:
    far = ids.task_id(RUN_ID, 1 << 26)
    names = ArchiveNames()
    assert names.name("0" * 26, far, "html") == f"{far}.html"
    assert names.name(far, None, "html") == f"{far} (2).html"


def test_no_body_is_taken_for_the_manifest() -> None:
    assert named(["manifest"], "jsonl") == ["manifest (2).jsonl"]


def test_every_format_has_an_extension() -> None:
    assert {EXTENSIONS[one] for one in Format} == {"html", "json", "md", "txt", "pdf"}


def test_a_table_of_counts_grows_once_two_thirds_of_its_slots_are_taken() -> None:
    """12 bytes a slot: a run of millions of rows has them all in memory."""
    counts, sizes = UseCounts(), []
    for key in range(1, 1_400):
        assert [counts.add(key) for _ in range(2)] == [1, 2], key
        sizes.append(len(counts._keys))

    assert sorted(set(sizes)) == [1_024, 2_048, 4_096]
    assert (sizes.count(1_024), sizes.count(2_048)) == (682, 1_365 - 682)


def test_no_two_of_many_rows_with_the_same_ids_have_one_name() -> None:
    """Whichever row it is that makes the table of names grow."""
    ids: list[str | None] = [f"shop-{number}" for number in range(1_400)]
    found = named(ids * 2)
    assert len(set(found)) == len(found)


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), max_size=3_000))
def test_uses_are_counted(keys: list[int]) -> None:
    counts, seen = UseCounts(), dict.fromkeys(keys, 0)
    for key in keys:
        seen[key] += 1
        assert counts.add(key) == seen[key]


@pytest.mark.slow
def test_a_name_costs_few_bytes_of_memory() -> None:
    names, count = ArchiveNames(), 50_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            names.name("0" * 26, f"a-rather-long-external-id-of-a-caller-{number}", "html")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 40 * count
