"""Content codings: byte for byte, in pieces of any size, never more than the bound."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.model import TaskFailure
from conveyor.gateway.decode import MAX_MEMBERS, PIECE, Decoder, known_codings
from conveyor.ports.gateway import ScrapeFailed

LIMIT = 10_000_000


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compressor.compress(body) + compressor.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "zlib deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "br": ("br", brotli.compress),
}
every_coding = pytest.mark.parametrize(("coding", "encode"), ENCODERS.values(), ids=ENCODERS)


def decode(wire: bytes, *codings: str, limit: int = LIMIT, step: int = PIECE) -> bytes:
    decoder = Decoder(codings, limit)
    pieces: list[bytes] = []
    for start in range(0, len(wire), step):
        pieces.extend(decoder.feed(wire[start : start + step]))
    decoder.finish()
    return b"".join(pieces)


@every_coding
@pytest.mark.parametrize("step", [1, 7, PIECE])
def test_bytes_survive(coding: str, encode: Callable[[bytes], bytes], step: int) -> None:
    for body in (b"", b"x", bytes(range(256)) * 40, b"\0" * 300_000):
        assert decode(encode(body), coding, step=step) == body


@given(body=st.binary(max_size=2_000), step=st.integers(1, 500), which=st.sampled_from([*ENCODERS]))
def test_any_bytes_survive_in_any_pieces(body: bytes, step: int, which: str) -> None:
    coding, encode = ENCODERS[which]
    assert decode(encode(body), coding, step=step) == body


def test_codings_are_undone_once_each_and_last_first() -> None:
    body = b"page" * 1_000
    assert decode(brotli.compress(gzip.compress(body)), "gzip", "br") == body
    assert decode(gzip.compress(gzip.compress(body)), "gzip", "gzip") == body
    assert gzip.decompress(decode(gzip.compress(gzip.compress(body)), "gzip")) == body


@every_coding
def test_an_empty_body_needs_no_frame(coding: str, encode: Callable[[bytes], bytes]) -> None:
    assert decode(b"", coding) == b""


@pytest.mark.parametrize("step", [1, 3, PIECE])
def test_every_member_of_a_gzip_stream_counts(step: int) -> None:
    wire = gzip.compress(b"one") + gzip.compress(b"") + gzip.compress(b"two")
    assert decode(wire, "gzip", step=step) == b"onetwo"


@pytest.mark.parametrize("tail", [b"\0" * 9, b"garbage", b"\x1f", b"\x1fgarbage"])
@pytest.mark.parametrize("step", [1, PIECE])
@pytest.mark.parametrize("which", ["gzip", "zlib deflate", "raw deflate"])
def test_what_follows_the_end_is_ignored(which: str, step: int, tail: bytes) -> None:
    coding, encode = ENCODERS[which]
    assert decode(encode(b"page") + tail, coding, step=step) == b"page"


@pytest.mark.parametrize("step", [1, PIECE])
def test_what_follows_the_end_of_brotli_is_damage(step: int) -> None:
    with pytest.raises(ScrapeFailed, match="corrupt_body"):
        decode(brotli.compress(b"page") + b"garbage", "br", step=step)


@every_coding
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.95])
def test_a_stream_cut_off_is_worth_another_attempt(
    coding: str, encode: Callable[[bytes], bytes], kept: float
) -> None:
    wire = encode(bytes(range(256)) * 400)
    with pytest.raises(ScrapeFailed) as caught:
        decode(wire[: max(1, int(len(wire) * kept))], coding)
    assert (caught.value.problem.code, caught.value.retryable) == ("corrupt_body", True)
    assert caught.value.failure is TaskFailure.GATEWAY_ERROR


def test_a_second_member_cut_off_is_no_whole_body() -> None:
    with pytest.raises(ScrapeFailed, match="corrupt_body"):
        decode(gzip.compress(b"one") + gzip.compress(b"two")[:-3], "gzip")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_what_is_not_encoded_at_all_is_corrupt(coding: str) -> None:
    with pytest.raises(ScrapeFailed, match="corrupt_body"):
        decode(b"<!doctype html><title>plain</title>" * 10, coding)


def test_a_checksum_that_is_wrong_is_corrupt() -> None:
    wire = bytearray(gzip.compress(b"page" * 100))
    wire[-6] ^= 1
    with pytest.raises(ScrapeFailed, match="corrupt_body"):
        decode(bytes(wire), "gzip")


@every_coding
def test_the_bound_is_exact(coding: str, encode: Callable[[bytes], bytes]) -> None:
    body = bytes(range(256)) * 1_000
    assert decode(encode(body), coding, limit=len(body)) == body
    with pytest.raises(ScrapeFailed) as caught:
        decode(encode(body), coding, limit=len(body) - 1)
    assert (caught.value.problem.code, caught.value.retryable) == ("result_too_large", False)
    assert caught.value.failure is TaskFailure.BAD_TARGET


def test_the_bound_of_a_plain_body_is_exact() -> None:
    assert decode(b"x" * 1_000, limit=1_000) == b"x" * 1_000
    with pytest.raises(ScrapeFailed, match="result_too_large"):
        decode(b"x" * 1_001, limit=1_000)


def bombs() -> dict[str, tuple[list[str], list[bytes]]]:
    ten_megabytes = b"\0" * 10_000_000
    member = gzip.compress(ten_megabytes)
    compressor = brotli.Compressor(quality=1)
    br = [compressor.process(ten_megabytes) for _ in range(100)]
    nested = gzip.compress(member * 100)
    return {
        "gzip of 1 GB": (["gzip"], [member] * 100),
        "br of 1 GB": (["br"], br),
        "gzip in gzip of 1 GB": (["gzip", "gzip"], [nested]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gzip of 1 GB", "br of 1 GB", "gzip in gzip of 1 GB"])
def test_a_bomb_never_unfolds(name: str) -> None:
    codings, wire = bombs()[name]
    limit = 5_000_000
    decoder = Decoder(codings, limit)
    seen, largest = 0, 0

    def run() -> None:
        nonlocal seen, largest
        for data in wire:
            for piece in decoder.feed(data):
                seen += len(piece)
                largest = max(largest, len(piece))
        decoder.finish()

    tracemalloc.start()
    try:
        with pytest.raises(ScrapeFailed, match="result_too_large"):
            run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen <= limit
    assert largest <= 4 * PIECE
    assert peak < 4_000_000


def test_members_without_content_are_bounded_too() -> None:
    empty = gzip.compress(b"")
    assert decode(empty * MAX_MEMBERS, "gzip") == b""
    with pytest.raises(ScrapeFailed, match="corrupt_body"):
        decode(empty * (MAX_MEMBERS + 1), "gzip")


def test_frames_without_content_are_bounded_too() -> None:
    skipped = b"\x50\x2a\x4d\x18" + bytes(4)
    assert decode(skipped * MAX_MEMBERS, "zstd") == b""
    with pytest.raises(ScrapeFailed, match="corrupt_body"):
        decode(skipped * (MAX_MEMBERS + 1), "zstd")


def test_encoded_bytes_that_decode_to_nothing_are_bounded_too() -> None:
    stored_nothing = b"\x00\x00\x00\xff\xff"
    with pytest.raises(ScrapeFailed, match="result_too_large"):
        decode(stored_nothing * 100_000, "deflate", limit=1_000)


@pytest.mark.parametrize(
    ("values", "known"),
    [
        ([], []),
        (["gzip"], ["gzip"]),
        (["GZip , BR"], ["gzip", "br"]),
        (["deflate", "identity, x-gzip"], ["deflate", "x-gzip"]),
        (["exi"], []),
        (["exi, gzip"], ["gzip"]),
        (["gzip, exi"], []),
        (["", ","], []),
    ],
)
def test_only_known_codings_are_undone(values: list[str], known: list[str]) -> None:
    assert known_codings(values) == known


def test_a_fourth_coding_is_refused() -> None:
    assert known_codings(["gzip, gzip, br"]) == ["gzip", "gzip", "br"]
    with pytest.raises(ScrapeFailed, match="too_many_codings"):
        known_codings(["gzip, gzip", "br, gzip"])
