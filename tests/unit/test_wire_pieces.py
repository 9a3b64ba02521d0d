"""Pieces that arrive together count as if they had come apart, and cost no more memory."""

from __future__ import annotations

import ssl
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import read_proxy
from conveyor.wire.response import MAX_PADDING, ResponseReader
from conveyor.wire.tls import TlsSession, client_context
from tests.nasty.certificate import Certificate


def test_what_comes_before_a_damaged_record_is_not_lost(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = certificate.server_context().wrap_bio(to_server, to_client, server_side=True)
    session = TlsSession(client_context(certificate.authority), "localhost")
    is_done = session.shake_hands(b"")
    for _ in range(3):
        to_server.write(session.outgoing())
        with suppress(ssl.SSLWantReadError):
            server.do_handshake()
        is_done = is_done or session.shake_hands(to_client.read())
    assert is_done

    server.write(b"a whole answer")
    damaged = b"\x17\x03\x03\x00\x20" + bytes(32)

    assert session.decrypt(to_client.read() + damaged) == b"a whole answer"
    assert (session.is_damaged, session.is_closed) == (True, False)


def test_tiny_chunks_take_no_more_memory_than_their_bytes() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunks = b"2\r\nab\r\n" * 8_192
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        reader.feed(chunks)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert reader.buffered == 16_384
    assert after - before < 2 * 16_384
    assert reader.take() == b"ab" * 8_192


def test_a_proxy_whose_user_is_not_unicode_is_refused() -> None:
    with pytest.raises(TransportError) as caught:
        read_proxy("http://us\udcffer:secret@proxy.test:1")

    assert caught.value.trouble is TransportTrouble.UNSENDABLE


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4_096])
def test_chunks_are_read_alike_whole_and_in_packets_of_any_size(size: int) -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\na\r\n0a\r\nbcdefghijk\r\n2;x=y\r\nlm\r\n1 \r\nn\r\nC\r\nopqrstuvwxyz\r\n0\r\n\r\n"
    )
    reader = ResponseReader()
    for place in range(0, len(answer), size):
        reader.feed(answer[place : place + size])

    assert reader.take() == b"abcdefghijklmnopqrstuvwxyz"
    assert (reader.is_complete, reader.may_keep) == (True, True)


def test_a_line_of_a_chunk_that_never_ends_is_bounded() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;")
    reader.feed(b"x" * (MAX_PADDING - 100))
    with pytest.raises(TransportError) as caught:
        reader.feed(b"x" * 200)
    assert caught.value.trouble is TransportTrouble.MALFORMED


@pytest.mark.parametrize(
    ("trailers", "is_kept"),
    [(b"X: ab\r\n", True), (b"X: a\rb\r\n", False), (b"X: ab\n", False), (b"\rX: a\r\n", False)],
)
def test_a_connection_with_odd_lines_behind_its_chunks_is_not_kept(
    trailers: bytes, is_kept: bool
) -> None:
    """Another reader may see another end of that answer."""
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    reader.feed(b"2\r\nab\r\n0\r\n" + trailers + b"\r\n")
    assert (reader.take(), reader.is_complete, reader.may_keep) == (b"ab", True, is_kept)
