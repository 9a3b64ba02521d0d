"""Page cursors under the service's keys."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.domain.cursor import decode_cursor, encode_cursor
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


def bad_cursor() -> ConveyorError:
    """The refusal of a cursor that was made for something else."""
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, "cursor: not a cursor of this list")
