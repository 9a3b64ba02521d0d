"""All answers of the nasty origin."""

from __future__ import annotations

from tests.nasty.answer import Family, Kind, Nasty
from tests.nasty.chunks import CHUNKED
from tests.nasty.codings import CONTENT_CODINGS
from tests.nasty.ends import ENDS, MOMENTS, TLS_ENDS
from tests.nasty.heads import INTERIM, LINES, STATUS_LINES
from tests.nasty.lengths import CODINGS, LENGTHS, NO_BODY, SURPLUS

FAMILIES: tuple[Family, ...] = (
    STATUS_LINES,
    LINES,
    INTERIM,
    LENGTHS,
    CODINGS,
    CHUNKED,
    NO_BODY,
    SURPLUS,
    CONTENT_CODINGS,
    ENDS,
    TLS_ENDS,
    MOMENTS,
)


KINDS: tuple[Kind, ...] = tuple(kind for family in FAMILIES for kind in family.kinds)
"""Every row of the table."""
ANSWERS: dict[str, Nasty] = {
    f"{kind.name}: {answer.name}": answer for kind in KINDS for answer in kind.answers
}
"""Every answer under its full name."""
