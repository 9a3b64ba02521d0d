"""The answers of the nasty origin, fed to the protocol itself: no verdict depends on how the bytes
fell into packets, and a part of an answer never passes for the answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec
import pytest

from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.response import Ending, ResponseReader
from tests.nasty.answer import End, Kind, Nasty, sized
from tests.nasty.corpus import ANSWERS, KINDS

SHORT = 600
"""Answers of up to that many bytes are cut everywhere; of longer ones, some cuts are taken."""
SOME = 5
WHOLLY = 10_000
"""Answers of up to that many bytes are cut everywhere at the sizes of `full`."""
_ENDINGS = {
    End.STAYS: None,
    End.FIN: Ending.CLEAN,
    End.BARE_FIN: Ending.RAGGED,
    End.RESET: Ending.RESET,
}


class Verdict(msgspec.Struct, frozen=True):
    """The end of an answer. `trouble` is None for one that is whole, and `body` then all of it;
    `trouble` is "waiting" for one that is not yet whole."""

    trouble: TransportTrouble | str | None
    status: int = 0
    body: bytes = b""
    may_keep: bool = False


def read(pieces: Iterable[bytes], ending: Ending | None, method: str = "GET") -> Verdict:
    reader = ResponseReader(method)
    body = []
    try:
        for piece in pieces:
            reader.feed(piece)
            body.append(reader.take())
        if ending is not None:
            reader.finish(ending)
    except TransportError as error:
        return Verdict(error.trouble)
    if not reader.is_complete or reader.head is None:
        return Verdict("waiting")
    return Verdict(None, reader.head.status, b"".join(body), reader.may_keep)


def expected(answer: Nasty) -> Verdict:
    if answer.trouble is TransportTrouble.TIMEOUT:
        return Verdict("waiting")
    if answer.trouble is not None:
        return Verdict(answer.trouble)
    return Verdict(None, answer.status, answer.body, answer.kept)


def sent(answer: Nasty) -> bytes:
    """Return what the origin sends before the caller has the answer."""
    return answer.wire + answer.surplus


def ending(answer: Nasty) -> Ending | None:
    """Return how the connection ends while the caller waits for the answer."""
    return None if answer.pushed or answer.late else _ENDINGS[answer.end]


def cuts(length: int, seed: str) -> Sequence[int]:
    """Return every place inside so many bytes, or some of a long answer: where most happens, and
    others by chance."""
    if length <= SHORT:
        return range(1, length)
    by_chance = random.Random(seed)
    places = {by_chance.randrange(1, length) for _ in range(SOME)}
    places |= {1, length - 1, 65_536, 65_600, 262_144}
    return sorted(place for place in places if 0 < place < length)


EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def test_there_are_many_and_each_has_a_reason() -> None:
    assert len(ANSWERS) == sum(len(kind.answers) for kind in KINDS) >= 250
    assert all(kind.why for kind in KINDS)
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@EACH_KIND
def test_the_verdict_on_an_answer_in_one_packet(kind: Kind) -> None:
    for answer in kind.answers:
        verdict = read([sent(answer)], ending(answer), answer.method)
        assert verdict == expected(answer), answer.name


@pytest.mark.slow
@EACH_KIND
def test_the_verdict_does_not_depend_on_the_cut(kind: Kind) -> None:
    for answer in kind.answers:
        wire, end, right = sent(answer), ending(answer), expected(answer)
        for place in cuts(len(wire), answer.name):
            verdict = read([wire[:place], wire[place:]], end, answer.method)
            assert verdict == right, (answer.name, place)
        if len(wire) <= SHORT:
            assert read(bytewise(wire), end, answer.method) == right, answer.name


@pytest.mark.full
@pytest.mark.timeout(1_800)
@EACH_KIND
def test_the_verdict_does_not_depend_on_the_cut_of_long_answers(kind: Kind) -> None:
    """Those of up to WHOLLY bytes at every byte; all of them in packets of a byte, which stop at
    every byte as well."""
    for answer in kind.answers:
        wire, end, right = sent(answer), ending(answer), expected(answer)
        for place in range(1, len(wire)) if SHORT < len(wire) <= WHOLLY else ():
            verdict = read([wire[:place], wire[place:]], end, answer.method)
            assert verdict == right, (answer.name, place)
        assert read(bytewise(wire), end, answer.method) == right, answer.name


@pytest.mark.slow
@EACH_KIND
def test_a_part_of_an_answer_is_never_whole(kind: Kind) -> None:
    """Every proper prefix, whichever way the connection ends there."""
    for answer in kind.answers:
        troubles = {TransportTrouble.INTERRUPTED, TransportTrouble.TRUNCATED}
        if answer.trouble is TransportTrouble.MALFORMED:
            troubles.add(TransportTrouble.MALFORMED)
        if answer.until_end:
            troubles.add(TransportTrouble.RAGGED)
        for place in (0, *cuts(len(answer.wire), answer.name)):
            for end in Ending:
                verdict = read([answer.wire[:place]], end, answer.method)
                if answer.until_end and end is Ending.CLEAN and verdict.trouble is None:
                    assert answer.wire[:place].endswith(verdict.body)
                else:
                    assert verdict.trouble in troubles, (answer.name, place, end)


@pytest.mark.slow
@EACH_KIND
def test_bytes_after_the_end_change_nothing_but_that_no_request_follows(kind: Kind) -> None:
    for answer in kind.answers:
        if answer.trouble is not None or answer.until_end:
            continue
        wire = answer.wire
        right = msgspec.structs.replace(expected(answer), may_keep=False)
        for surplus in (b"\r\n", b"x", sized(status=b"HTTP/1.1 500 x")):
            for pieces in ([wire + surplus], [wire, surplus], [wire[:-1], wire[-1:] + surplus]):
                assert read(pieces, None, answer.method) == right, answer.name


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        *[(seed, 1_000) for seed in range(4)],
        pytest.param(4, 1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(1_800)]),
    ],
)
def test_the_verdict_on_a_damaged_answer_does_not_depend_on_the_cut(seed: int, count: int) -> None:
    by_chance = random.Random(seed)
    short = [answer for answer in ANSWERS.values() if len(sent(answer)) <= SHORT]
    for _ in range(count):
        answer = by_chance.choice(short)
        wire = damaged(sent(answer), sent(by_chance.choice(short)), by_chance)
        end = by_chance.choice([None, *Ending])
        place = by_chance.randrange(len(wire) + 1)
        right = read([wire], end, answer.method)
        assert read([wire[:place], wire[place:]], end, answer.method) == right, (wire, place)
        assert read(bytewise(wire), end, answer.method) == right, wire


def bytewise(wire: bytes) -> list[bytes]:
    return [wire[place : place + 1] for place in range(len(wire))]


ODD = (b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b";", b",", b"0", b"\x0b")


def damaged(wire: bytes, other: bytes, by_chance: random.Random) -> bytes:
    """Return an answer with some bytes replaced, left out, repeated, or taken from another one."""
    for _ in range(by_chance.randrange(1, 4)):
        place = by_chance.randrange(len(wire) + 1)
        until = min(len(wire), place + by_chance.choice((0, 1, 1, 2, 8)))
        start = by_chance.randrange(len(other) + 1)
        new = by_chance.choice((by_chance.choice(ODD), other[start : start + 20], b""))
        wire = wire[:place] + new + wire[until:]
    return wire
