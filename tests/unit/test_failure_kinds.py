"""Failures by kind: what varies from task to task is left out, and ids never change."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.failure_groups import (
    ID_LENGTH,
    LONGEST_DETAIL,
    OTHER_GROUP,
    FailureGroup,
    FailureGroups,
    failure_kind,
    group_filter,
    is_group_id,
)
from conveyor.domain.model import Problem, TaskFailure

PROPERTY = settings(database=None)
ID_OF_BLOCKED = "2uj3hkmdmsix"
""""timed out after N s", blocked, 502."""


def problem(detail: str | None, **fields: object) -> Problem:
    """A problem with a detail."""
    values = {"code": "blocked", "title": "Blocked", "status": 502} | fields
    return Problem(detail=detail, **values)  # type: ignore[arg-type]


def detail_of(text: str | None) -> str:
    """The rest of a detail."""
    return failure_kind(TaskFailure.BLOCKED, problem(text)).detail


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("timed out after 30 s", "timed out after N s"),
        ("took 1,234.5 ms on 2026-11-29", "took N ms on N"),
        ("port 8080 of 10.0.0.1:443", "port N of N"),
        ("GET https://example.com/a?b=1 failed", "GET URL failed"),
        ("see ftp+x://host/path, please", "see URL please"),
        ('no "such thing" here', "no TEXT here"),
        ("no 'such thing' or `code` or “word” or ‘word’", "no TEXT or TEXT or TEXT or TEXT"),
        ("request 01ARZ3NDEKTSV4RRFFQ69G5FAV was lost", "request ID was lost"),
        ("trace 4bf92f35-77b3-4da6-a3ce-929d0e0e4736 ended", "trace ID ended"),
        ("  two\n lines\tand tabs ", "two lines and tabs"),
        ("gateway unreachable", "gateway unreachable"),
        ("http2 said h2c", "httpN said hNc"),
        ("", "Blocked"),
        (None, "Blocked"),
    ],
)
def test_what_varies_is_taken_out(text: str | None, left: str) -> None:
    assert detail_of(text) == left


@PROPERTY
@given(st.text(), st.integers(0, 10**12), st.integers(0, 10**12))
def test_numbers_make_no_difference(words: str, one: int, other: int) -> None:
    assert detail_of(f"{words} {one} s") == detail_of(f"{words} {other} s")


@PROPERTY
@given(st.text(max_size=2_000))
def test_every_detail_has_a_group_of_bounded_text(text: str) -> None:
    kind = failure_kind(TaskFailure.OTHER, problem(text))
    assert len(kind.detail) <= LONGEST_DETAIL
    assert re.fullmatch(r"[a-z2-7]{12}", kind.group_id)
    assert is_group_id(kind.group_id)
    assert failure_kind(TaskFailure.OTHER, problem(text)) == kind


def test_details_differ_by_their_first_letters_alone() -> None:
    long = "word " * LONGEST_DETAIL
    assert detail_of(long + "a") == detail_of(long + "b")
    assert detail_of("a" + long) != detail_of("b" + long)


def test_reason_code_and_status_make_groups_of_their_own() -> None:
    kinds = [
        failure_kind(TaskFailure.BLOCKED, problem("x")),
        failure_kind(TaskFailure.TIMEOUT, problem("x")),
        failure_kind(TaskFailure.BLOCKED, problem("x", code="other")),
        failure_kind(TaskFailure.BLOCKED, problem("x", status=503)),
        failure_kind(TaskFailure.BLOCKED, problem("y")),
    ]
    assert len({kind.group_id for kind in kinds}) == len(kinds)
    same = problem("x", title="Else", type="about:else", instance="/1")
    assert failure_kind(TaskFailure.BLOCKED, same) == kinds[0]


def test_ids_are_those_that_stores_hold_already() -> None:
    assert failure_kind(TaskFailure.BLOCKED, problem("timed out after 30 s")).group_id == (
        ID_OF_BLOCKED
    )


@pytest.mark.parametrize(
    "text", ["", "a" * 11, "a" * 13, "A" * 12, "a" * 11 + "1", "Other", "é" * 12]
)
def test_other_words_name_no_group(text: str) -> None:
    assert not is_group_id(text)
    assert is_group_id(OTHER_GROUP)
    assert is_group_id("a" * ID_LENGTH)


def test_a_choice_of_groups_is_one_of_those_that_a_run_keeps() -> None:
    named = group_filter(frozenset({"a", "unknown"}), ["a", "b"])
    assert [named.takes(group) for group in ("a", "b", "unknown", None)] == [
        True, False, False, False,
    ]  # fmt: skip
    other = group_filter(frozenset({"a", OTHER_GROUP}), ["a", "b"])
    assert [other.takes(group) for group in ("a", "b", "unknown", None)] == [
        True, False, True, True,
    ]  # fmt: skip


def test_what_is_in_no_group_is_left_of_the_failed() -> None:
    group = FailureGroup(
        group_id="a", reason=TaskFailure.OTHER, code="c", status=500, count=3, first_at=0, last_at=0
    )
    assert FailureGroups(5, [group]).other == 2
    assert FailureGroups(0, []).other == 0
