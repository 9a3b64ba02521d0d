"""Page cursors under the service's keys, and what the cursor of a list of results may say."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.cursor import (
    COMPOSITE,
    decode_cursor,
    decode_positions,
    encode_cursor,
    encode_positions,
    is_composite,
)
from conveyor.domain.errors import ConveyorError, ErrorCode


class Cursors:
    """Encodes under the first key, decodes under any."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)

    def encode(self, position: str, *, scope: str) -> str:
        """The cursor that continues after `position` in the list named by `scope`."""
        return encode_cursor(position, scope=scope, key=self._keys[0])

    def decode(self, text: str, *, scope: str) -> str:
        """The position in a cursor. Raises ConveyorError(invalid_argument) for any other text."""
        for key in self._keys[:-1]:
            try:
                return decode_cursor(text, scope=scope, key=key)
            except ConveyorError:
                continue
        return decode_cursor(text, scope=scope, key=self._keys[-1])


class RunPosition(msgspec.Struct, frozen=True):
    """Where a list of results goes on: in which run (None: a task id was given, which names none),
    and after which index of each shard."""

    run_id: str | None
    after: tuple[int, ...]
    composite: bool = False

    def in_shards(self, count: int) -> tuple[int, ...]:
        """The positions, for a run of so many shards. Raises ConveyorError(invalid_argument) where
        the cursor was made for another number of them."""
        if self.composite != (count > 1) or len(self.after) != count:
            raise bad_cursor()
        return self.after


def encode_run_position(cursors: Cursors, run_id: str, after: Sequence[int], *, scope: str) -> str:
    """The cursor that goes on in a run after one index a shard; a composite one where there are
    many."""
    if len(after) == 1:
        return cursors.encode(f"{run_id}.{after[0]}", scope=scope)
    position = encode_positions(run_id, after)
    return COMPOSITE + cursors.encode(position, scope=f"{COMPOSITE}{scope}")


def decode_run_position(cursors: Cursors, text: str, *, scope: str) -> RunPosition:
    """The position that a cursor holds, or a plain task id. Raises
    ConveyorError(invalid_argument) for any other text."""
    if is_composite(text):
        return _composite(cursors, text, scope)
    try:
        position = cursors.decode(text, scope=scope)
    except ConveyorError:
        if ids.is_task_id(text):
            return RunPosition(None, (ids.task_index(text),))
        raise
    run_id, _, index = position.partition(".")
    if not index.isdecimal():
        raise bad_cursor()
    return RunPosition(run_id, (int(index),))


def _composite(cursors: Cursors, text: str, scope: str) -> RunPosition:
    position = cursors.decode(text.removeprefix(COMPOSITE), scope=f"{COMPOSITE}{scope}")
    try:
        run_id, after = decode_positions(position)
    except ValueError:
        raise bad_cursor() from None
    return RunPosition(run_id, after, composite=True)


def bad_cursor() -> ConveyorError:
    """The refusal of a cursor that was made for something else."""
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, "cursor: not a cursor of this list")
