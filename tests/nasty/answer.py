"""The shape of a nasty answer: its bytes, how its connection ends, and the right verdict on it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.wire.errors import TransportTrouble

BODY = b"a page of its own"
CHUNKS = b"11\r\n" + BODY + b"\r\n0\r\n\r\n"
POISON = b"POISON"
"""Stands in bytes that belong to no body. No caller may ever see it."""

OK = b"HTTP/1.1 200 OK"
LENGTH = b"Content-Length: 17"
TO_CHUNKS = b"Transfer-Encoding: chunked"


class End(StrEnum):
    """The origin's ways with the connection after its last byte."""

    STAYS = "stays"
    FIN = "FIN"
    BARE_FIN = "FIN without close_notify"
    RESET = "reset"


class Nasty(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the nasty origin.

    `wire` ends where the answer does; `surplus` follows at once, `pushed` once the caller has the
    answer, `late` once the caller has given up. `end` is what happens to the connection after all
    of them. `is_early`: the origin answers before it has read the body of the request. Of the
    verdict, `trouble` and `body` concern the framing alone; `content` is the body without its
    content codings, or the code of the problem that a gateway reports. `kept` says whether the
    framing lets another request go over the connection. `until_end` marks a body that only the end
    of the connection ends.
    """

    name: str
    wire: bytes
    surplus: bytes = b""
    pushed: bytes = b""
    late: bytes = b""
    end: End = End.STAYS
    is_early: bool = False
    method: str = "GET"
    is_tls: bool = False
    trouble: TransportTrouble | None = None
    status: int = 200
    body: bytes = BODY
    content: bytes | str | None = None
    kept: bool = False
    until_end: bool = False


class Kind(msgspec.Struct, frozen=True):
    """Answers that are nasty in one way and deserve one verdict: a row of the table."""

    name: str
    why: str
    answers: tuple[Nasty, ...]


class Family(msgspec.Struct, frozen=True):
    """Kinds about one part of an answer: a section of the table."""

    name: str
    kinds: tuple[Kind, ...]


def head(*lines: bytes, status: bytes = OK, line_end: bytes = b"\r\n") -> bytes:
    """Return a head with its empty line."""
    return line_end.join([status, *lines, b"", b""])


def sized(*lines: bytes, status: bytes = OK) -> bytes:
    """Return an answer whose first line announces the length of BODY."""
    return head(LENGTH, *lines, status=status) + BODY


def chunked(*lines: bytes, chunks: bytes = CHUNKS, status: bytes = OK) -> bytes:
    """Return an answer in chunks."""
    return head(TO_CHUNKS, *lines, status=status) + chunks


def kept(name: str, wire: bytes, body: bytes = BODY, *, status: int = 200) -> Nasty:
    """Return an answer that is whole and after which the connection is good."""
    return Nasty(name=name, wire=wire, body=body, status=status, kept=True)


def closed(name: str, wire: bytes, body: bytes = BODY, *, status: int = 200) -> Nasty:
    """Return an answer that is whole, over a connection that no other request may use."""
    return Nasty(name=name, wire=wire, body=body, status=status)


def ended(name: str, wire: bytes, body: bytes = BODY, *, end: End = End.FIN) -> Nasty:
    """Return an answer that is whole once its connection has ended."""
    return Nasty(name=name, wire=wire, body=body, end=end, until_end=True)


def malformed(name: str, wire: bytes) -> Nasty:
    """Return an answer that is an error at whichever byte proves it, the connection still open."""
    return Nasty(name=name, wire=wire, trouble=TransportTrouble.MALFORMED)


def cut(name: str, wire: bytes, trouble: TransportTrouble, end: End = End.FIN) -> Nasty:
    """Return an answer whose connection ends too early."""
    return Nasty(name=name, wire=wire, trouble=trouble, end=end)
