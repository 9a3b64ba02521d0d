"""The table of hostile answers: a row a kind, with the verdicts of Conveyor and of its peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.nasty.answer import End, Kind, Nasty
from tests.nasty.corpus import ANSWERS, FAMILIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "hostile-answers.md"

_INTRODUCTION = """\
# Hostile answers

Servers are hostile, slow and wrong. This is what Conveyor makes of {count} answers that are, in
{kinds} kinds, beside what {peers} make of the same bytes. Every row is a test:
`tests/nasty` holds the answers, `tests/unit/test_nasty_protocol.py` and
`tests/unit/test_nasty_sockets.py` feed them to the client and through the gateways, and
`tests/acceptance/test_nasty_run.py` to `conveyor run`. Written by `python -m tests.nasty`, never by
hand. A number in brackets counts answers of a row.

- **whole**: the body is complete. **kept**: the next request may use the connection. **closed**:
  it may not.
- **malformed**, **truncated** (the body was cut), **interrupted** (no whole head), **ragged** (over
  TLS, closed without close_notify), **corrupt**, **too large**, **too many codings**, **timeout**:
  the attempt failed for that reason. The connection is closed, unless only the coding was wrong.

Peers run as they come, curl with `--compressed`:

- **taken as whole**: it gives the caller a body where there is no whole one. **no bound**: it gives
  more than 1 MiB, since the caller bounds nothing.
- **another body**: other bytes than were meant.
- **the next answer is wrong**: who comes next gets bytes of this answer.
- **the next answer fails**: who comes next gets an error, or waits, for this answer.
- **refused**: an error. **waits**: nothing happens until the timeout.
"""


def followed(answer: Nasty) -> bool:
    """Return whether the next request goes over the same connection."""
    is_disturbed = answer.surplus or answer.pushed or answer.late
    return answer.kept and answer.end is End.STAYS and not is_disturbed


def verdict(answer: Nasty) -> str:
    """Return Conveyor's verdict in a few words."""
    if isinstance(answer.content, str):
        return answer.content.removeprefix("result_").removesuffix("_body").replace("_", " ")
    if answer.trouble is not None and answer.content is None:
        return answer.trouble.value
    if answer.is_early:
        return "whole"
    return "whole, kept" if followed(answer) else "whole, closed"


def summary(verdicts: Iterable[str]) -> str:
    """Return the verdicts on the answers of a kind, the most frequent first."""
    counts = Counter(verdicts).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return " · ".join(f"{text} ({count})" for text, count in counts)


def conveyor_column(kind: Kind) -> str:
    """Return what the row of a kind says of Conveyor."""
    return summary(verdict(answer) for answer in kind.answers)


def document(peers: Sequence[str], verdicts: Mapping[str, Mapping[str, str]]) -> str:
    """Return the document. `verdicts` has those of each peer by the full name of the answer."""
    parts = [
        _INTRODUCTION.format(
            count=len(ANSWERS),
            kinds=sum(len(family.kinds) for family in FAMILIES),
            peers=" and ".join(peers),
        )
    ]
    header = ["Kind", "Answers", "Conveyor", *peers, "Why"]
    for family in FAMILIES:
        rows = [header, ["---"] * len(header)]
        for kind in family.kinds:
            names = [f"{kind.name}: {answer.name}" for answer in kind.answers]
            columns = [summary(verdicts[peer][name] for name in names) for peer in peers]
            rows.append([kind.name, str(len(names)), conveyor_column(kind), *columns, kind.why])
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## {family.name}\n\n{table}\n")
    return "\n".join(parts)


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each row of a document by the name of its kind."""
    lines = [line.strip("|\n ").split(" | ") for line in text.splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {line[0]: line for line in cells if line[0] not in ("Kind", "---")}
