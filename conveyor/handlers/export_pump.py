"""From rows, which come in on the event loop, to an archive, which is made in a thread."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import closing

from anyio import from_thread, to_thread

from conveyor.domain.export_rows import Exported

Writer = Callable[[Iterable[Exported]], Generator[bytes, None, None]]
"""Makes an archive while the rows come in; knows no event loop."""

BLOCK = 256 * 1024
"""Bytes that are gathered before they are handed over."""


async def archive(
    writer: Writer, portions: AsyncIterator[list[Exported]]
) -> AsyncGenerator[bytes, None]:
    """The archive of these rows in blocks.

    Raises what `portions` raises. Everything is given up at the next portion after a cancellation.
    """
    with closing(writer(_rows(portions))) as output:
        while block := await to_thread.run_sync(_block, output):
            yield block


def _rows(portions: AsyncIterator[list[Exported]]) -> Iterator[Exported]:
    async def following() -> list[Exported] | None:
        return await anext(portions, None)

    while (portion := from_thread.run(following)) is not None:
        yield from portion


def _block(output: Iterator[bytes]) -> bytes:
    pieces = []
    size = 0
    for piece in output:
        pieces.append(piece)
        size += len(piece)
        if size >= BLOCK:
            break
    return b"".join(pieces)
