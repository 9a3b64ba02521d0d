"""Cursors: opaque, signed, bound to one list."""

from __future__ import annotations

import base64
from string import ascii_letters, digits

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.service.results import decode_cursor, encode_cursor

PROPERTY = settings(database=None)
KEY = b"k" * 32
SCOPE = "caller/jobs?status=open"


def refused(text: str, *, scope: str = SCOPE, key: bytes = KEY) -> None:
    with pytest.raises(ConveyorError) as caught:
        decode_cursor(text, scope=scope, key=key)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.detail == "cursor: not a cursor of this list"


@PROPERTY
@given(position=st.text(max_size=80), scope=st.text(max_size=40))
def test_a_position_comes_back(position: str, scope: str) -> None:
    text = encode_cursor(position, scope=scope, key=KEY)
    assert decode_cursor(text, scope=scope, key=KEY) == position
    assert len(text.encode()) == len(text)
    assert not set(text) & set("+/=&?# ")


@PROPERTY
@given(text=st.text(max_size=60))
def test_any_other_text_is_refused(text: str) -> None:
    refused(text)


@PROPERTY
@given(data=st.binary(max_size=60))
def test_any_other_token_is_refused(data: bytes) -> None:
    refused(base64.urlsafe_b64encode(data).decode().rstrip("="))


@PROPERTY
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_one_changed_byte_is_refused(place: int, flip: int) -> None:
    text = encode_cursor("01ARZ3NDEKTSV4RRFFQ69G5FAV", scope=SCOPE, key=KEY)
    token = bytearray(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    token[place % len(token)] ^= flip
    refused(base64.urlsafe_b64encode(bytes(token)).decode().rstrip("="))


@pytest.mark.parametrize("position", ["p", "po", "pos"])
def test_no_other_letter_stands_for_the_last_one(position: str) -> None:
    """Base64 leaves bits of it unused: a cursor has one spelling."""
    text = encode_cursor(position, scope=SCOPE, key=KEY)
    for letter in ascii_letters + digits + "-_":
        if letter != text[-1]:
            refused(text[:-1] + letter)


def test_a_cursor_of_another_list_caller_or_key_is_refused() -> None:
    text = encode_cursor("p", scope=SCOPE, key=KEY)
    refused(text, scope="caller/jobs?status=closed")
    refused(text, scope="other/jobs?status=open")
    refused(text, scope="")
    refused(text, key=b"j" * 32)


def test_scope_and_position_are_kept_apart() -> None:
    """Moving letters from one to the other never gives the same signature."""
    text = encode_cursor("1bc", scope="a", key=KEY)
    with pytest.raises(ConveyorError):
        decode_cursor(text, scope="a1", key=KEY)
    first = encode_cursor("x", scope="s1", key=KEY)
    second = encode_cursor("1x", scope="s", key=KEY)
    assert first[:16] != second[:16]


def test_neither_scope_nor_key_is_carried() -> None:
    text = encode_cursor("p", scope="very-secret-scope", key=b"very-secret-key!")
    token = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    assert b"very-secret" not in token


@pytest.mark.parametrize("addition", ["A", "\n", " ", "é"])
def test_an_addition_is_refused(addition: str) -> None:
    text = encode_cursor("position", scope=SCOPE, key=KEY)
    refused(text + addition)
    refused(addition + text)


def test_a_plain_task_id_and_a_long_text_are_refused() -> None:
    refused("0000019" + "A" * 19)
    refused("A" * 513)
    refused("A" * 1_000_000)
