"""Remarks of the check of a list that was taken: fields that nobody reads, and the bad tasks that
were left out because the caller asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from conveyor.domain.errors import InvalidTask
from conveyor.domain.text_rules import shorten

MAX_WARNINGS = 10
"""Maximum unknown names that an answer lists."""
MAX_LISTED = 100
"""Maximum bad tasks that an answer lists: those that were left out, or those of a refused file."""
MAX_NAME_SHOWN = 60

JOB_FIELDS = frozenset(
    {
        *("type", "status", "tasks", "file_input_id", "skip_invalid", "async"),
        *("name", "external_id", "metadata", "zenrows_params"),
        *("max_inflight", "priority", "max_attempts", "result_ttl_days"),
        *("callback", "webhook", "schedule", "politeness"),
    }
)
SCHEDULE_FIELDS = frozenset({"at", "rate", "calendar", "timezone", "overlap"})
WEBHOOK_FIELDS = frozenset({"url", "signature", "events"})
ADD_FIELDS = frozenset({"tasks", "last_batch", "skip_invalid"})
INPUT_FIELDS = frozenset({"type", "csv"})
CSV_FIELDS = frozenset({"csv.fields", "csv.header", "csv.delimiter", "csv.quote"})
TASK_FIELDS = frozenset({"url", "external_id", "metadata", "method", "body", "zenrows_params"})


class Remarks(msgspec.Struct, frozen=True):
    """The number of bad tasks that were left out, the first of them, and warnings."""

    skipped: int = 0
    invalid_tasks: tuple[InvalidTask, ...] = ()
    warnings: tuple[str, ...] = ()

    def joined(self, other: Remarks) -> Remarks:
        """Return the remarks on a document and on the file that it names; one of them alone has
        tasks."""
        return Remarks(
            self.skipped + other.skipped,
            self.invalid_tasks + other.invalid_tasks,
            (self.warnings + other.warnings)[: MAX_WARNINGS + 1],
        )


@dataclass(slots=True)
class _Unknown:
    where: str
    nearest: str | None
    times: int = 1


NO_REMARKS = Remarks()


class UnknownFields:
    """Collects the names of fields that nobody reads, in memory that does not grow with a list."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _Unknown] = {}
        self._ignored: list[str] = []
        self._has_more = False

    def note(
        self, fields: Mapping[str, object], known: frozenset[str], *, of: str, where: str
    ) -> None:
        """Note the names in `fields` that are not `known` to a document `of` a kind; null counts as
        absent."""
        for name, value in fields.items():
            if name in known or value is None:
                continue
            shown = shorten(name, limit=MAX_NAME_SHOWN)
            earlier = self._found.get((of, shown))
            if earlier is not None:
                earlier.times += 1
            elif len(self._found) < MAX_WARNINGS:
                self._found[of, shown] = _Unknown(where, _nearest(shown, known))
            else:
                self._has_more = True

    def note_ignored(self, name: str, reason: str) -> None:
        """Note a known field that means nothing here."""
        self._ignored.append(f'"{name}" was ignored: {reason}')

    def note_tasks(self, tasks: Iterable[object]) -> None:
        """Note the unknown fields of the tasks in a document."""
        for index, task in enumerate(tasks):
            if isinstance(task, Mapping) and not task.keys() <= TASK_FIELDS:
                self.note(task, TASK_FIELDS, of="a task", where=f"at index {index}")

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each name: first what means nothing here, then unknown names in the
        order in which they came."""
        said = [_sentence(name, of, one) for (of, name), one in self._found.items()]
        said = [*self._ignored, *said][:MAX_WARNINGS]
        return (*said, "more unknown fields were ignored") if self._has_more else tuple(said)


def _nearest(name: str, known: frozenset[str]) -> str | None:
    # Importing it above would cost every boot a few milliseconds.
    from difflib import get_close_matches

    # A common prefix would make all of them seem close.
    ends = {one.rpartition(".")[2]: one for one in sorted(known)}
    close = get_close_matches(name.rpartition(".")[2].lower().replace("-", "_"), ends, n=1)
    return ends[close[0]] if close else None


def _sentence(name: str, of: str, unknown: _Unknown) -> str:
    times = f"{unknown.times:,} times, first " if unknown.times > 1 else ""
    place = f" ({times}{unknown.where})" if unknown.where else ""
    hint = f': did you mean "{unknown.nearest}"?' if unknown.nearest is not None else ""
    return f'"{name}" is no field of {of} and was ignored{place}{hint}'
