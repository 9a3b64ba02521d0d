"""Ask whether bytes lie in a socket, without giving the interpreter's lock away.

`select.poll` gives it away, and another thread would take it, so the event loop would wait for each
answer. A call through `ctypes.PyDLL` keeps it; this one never blocks.
"""

from __future__ import annotations

import ctypes
import select


class _PollEntry(ctypes.Structure):
    """`struct pollfd` of poll(2)."""

    _fields_ = (
        ("fd", ctypes.c_int),
        ("events", ctypes.c_short),
        ("revents", ctypes.c_short),
    )


_poll = ctypes.PyDLL(None).poll
_ONE, _AT_ONCE = ctypes.c_ulong(1), ctypes.c_int(0)


class SocketInput:
    """One socket to ask about. The descriptor must be open whenever it is asked."""

    __slots__ = ("_entry",)

    def __init__(self, descriptor: int) -> None:
        self._entry = ctypes.byref(_PollEntry(descriptor, select.POLLIN, 0))

    def is_silent(self) -> bool:
        """Return whether the socket has neither a byte nor an end to read, and no error."""
        return bool(_poll(self._entry, _ONE, _AT_ONCE) == 0)
