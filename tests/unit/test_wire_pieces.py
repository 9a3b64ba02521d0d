"""What arrives together counts as if it had come apart, and costs no more memory."""

from __future__ import annotations

import tracemalloc

from conveyor.wire.response import ResponseReader


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
