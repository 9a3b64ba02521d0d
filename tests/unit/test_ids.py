"""Task ids: deterministic, ordered, of one form."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ulid import ULID

from conveyor.domain import ids

PROPERTY = settings(database=None)
RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
INDEXES = st.integers(0, ids.MAX_INDEX) | st.integers(0, 100_000)


@PROPERTY
@given(index=INDEXES)
def test_an_id_carries_its_index(index: int) -> None:
    text = ids.task_id(RUN, index)
    assert ids.is_task_id(text)
    assert ids.task_index(text) == index
    assert text == ids.task_id(RUN, index)


@PROPERTY
@given(first=INDEXES, second=INDEXES)
def test_ids_sort_as_their_indexes_do(first: int, second: int) -> None:
    assert (ids.task_id(RUN, first) < ids.task_id(RUN, second)) == (first < second)
    assert (ids.encode_index(first) < ids.encode_index(second)) == (first < second)


@pytest.mark.parametrize(
    ("index", "letters"),
    [
        (0, "0000000"),
        (31, "000000Z"),
        (32, "0000010"),
        (1_023, "00000ZZ"),
        (1_024, "0000100"),
        (ids.MAX_INDEX, "ZZZZZZZ"),
    ],
)
def test_the_letters_of_an_index(index: int, letters: str) -> None:
    assert ids.encode_index(index) == letters
    assert ids.task_id(RUN, index).startswith(letters)


def test_the_form_of_an_id_is_pinned() -> None:
    digest = hashlib.sha256(f"{RUN}:41".encode()).hexdigest().upper()
    assert ids.task_id(RUN, 41) == "0000019" + digest[:19]


def test_ids_of_different_runs_and_indexes_differ() -> None:
    made = {ids.task_id(run, index) for run in (RUN, RUN[::-1]) for index in range(5_000)}
    assert len(made) == 10_000


@pytest.mark.parametrize("index", [-1, ids.MAX_INDEX + 1])
def test_an_index_out_of_range(index: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        ids.task_id(RUN, index)


def test_a_ulid_is_recognised() -> None:
    assert ids.is_ulid(RUN)
    assert ids.is_ulid(str(ULID()))
    assert ids.is_ulid("7" + "Z" * 25)


@pytest.mark.parametrize(
    "text",
    [
        "",
        RUN[:-1],
        RUN + "0",
        RUN + "\n",
        RUN.lower(),
        "8" + RUN[1:],
        "0" * 25 + "I",
        "0" * 25 + "é",
    ],
)
def test_other_texts_are_no_ulid(text: str) -> None:
    assert not ids.is_ulid(text)


@pytest.mark.parametrize("letter", list("ILOUilou-_ \n"))
def test_letters_outside_the_alphabet_make_no_task_id(letter: str) -> None:
    text = ids.task_id(RUN, 5)[:-1] + letter
    assert not ids.is_task_id(text)
    with pytest.raises(ValueError, match="not a task id"):
        ids.task_index(text)


@pytest.mark.parametrize("text", ["", "0" * 25, "0" * 27, "0" * 26 + "\n"])
def test_a_task_id_has_one_length(text: str) -> None:
    assert not ids.is_task_id(text)


def test_the_alphabet() -> None:
    assert len(set(ids.ALPHABET)) == 32
    assert sorted(ids.ALPHABET) == list(ids.ALPHABET)
    assert ids.is_task_id(ids.ALPHABET[:26])
    assert ids.is_task_id(ids.ALPHABET[6:])
