"""The subset of a fleet that serves a run, so that a large fleet does not open all lanes at each of
its workers.

Every worker decides for itself, from the reports that it has heard, by a rendezvous hash of run and
worker: the workers with the highest scores serve, as many as can use the job's limit twice over and
at least a few. A fleet that is no larger serves every run with every worker. Who is silent for
PATIENCE is left out, so that the next ones by score take its place. Views may differ for a while:
then more workers than needed serve a run, never none.

Each worker reads the reports of all, which would grow with the square of the fleet. So the reports
of more than some hundred workers are read less often (READ_TOGETHER).

Two things widen a subset. While tasks of a run wait for slots, further workers with free slots join
it. And a run that nobody attends to, as far as is heard, is open to all, unless the fleet is
paused. A worker that is stopping counts as gone.

It is pure: it has no clock and asks nobody. All moments are monotonic seconds of this worker.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from conveyor.domain.model import DispatchableRun
from conveyor.domain.run_waits import LaneReport, RunWaitReason, WorkerReport

PATIENCE = 10.0
"""Seconds after which a worker without a word is left out, and a run that nobody attends to is open
to all."""
REPORT_EVERY = PATIENCE / 2
"""Most seconds between two reports of a worker in such a fleet: one may be late."""
REST = 60.0
"""Seconds for which a worker goes on serving a run once others do: views that differ for a moment
move nothing."""
READ_TOGETHER = 200_000
"""Reports, and lanes in them, that all workers of a fleet read in a second, at most: some 10 MB.
Each reads those of all, so a fleet of more than some hundred workers is looked at less often."""
LONGEST_SPAN = 60.0
"""Most seconds between two looks at the fleet: beyond it more than READ_TOGETHER are read."""
SPARE = 2
"""Times that the slots of a subset cover the limit of the job."""
RANKED = 4
"""Times the workers that a run needs of which the order is kept, for the ones that may join."""
_LEAST_RANKED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetOptions:
    """This worker, and how many serve a run: `least`, more where the limit of a job needs them.

    A run that is new to this worker counts as attended to for `grace` seconds, until the others may
    have found it and said so.
    """

    worker_id: str
    slots: int
    least: int
    grace: float


class _Word(NamedTuple):
    """The latest report of a worker, when it was first heard here, and the latest moment at which
    it can have been said."""

    report: WorkerReport
    heard_at: float
    said_by: float


@dataclass(slots=True)
class _Entry:
    """A run as it is known here. `ranked` are workers by score, the highest first. It was last
    attended to at `attended_at`; `idle_at` are the workers that found its queue empty, which they
    may leave alone by now. `short`: its tasks wait for slots."""

    run: DispatchableRun
    attended_at: float
    ranked: list[tuple[int, str]]
    serves: bool = False
    outside_since: float | None = None
    idle_at: frozenset[str] = frozenset()
    short: bool = False
    calling: dict[str, int] = field(default_factory=dict)


class Moves(NamedTuple):
    """The runs that this worker is to begin to serve, and those that it is to leave to others."""

    begins: Sequence[str]
    leaves: Sequence[str]


class RunSubset:
    """Choose the runs that one worker serves."""

    def __init__(self, options: SubsetOptions) -> None:
        self._own = options.worker_id
        self._least = options.least
        self._grace = options.grace
        self._slots = options.slots
        self._words: dict[str, _Word] = {}
        self._others: dict[str, WorkerReport] = {}
        self._own_use = 0
        self._least_slots = options.slots
        self._entries: dict[str, _Entry] = {}
        self._excused = False
        self._heard_at = -math.inf
        self._span = 0.0

    # -- the fleet --

    def is_due(self, now: float) -> bool:
        """Return whether the reports are to be read again: the larger the fleet, the later."""
        return now - self._heard_at >= self._span

    def excuse(self) -> None:
        """Note that the reports could not be read: nobody counts as silent for that."""
        self._excused = True

    def hear(self, reports: Sequence[WorkerReport], now: float) -> None:
        """Take in what all workers of the fleet say."""
        before, least_slots = self._others, self._least_slots
        read = len(reports) + sum(len(report.lanes) for report in reports)
        self._heard_at = now
        self._span = min(LONGEST_SPAN, len(reports) * read / READ_TOGETHER)
        self._others = self._live(reports, now)
        slots = [self._slots, *(report.slots for report in self._others.values())]
        self._least_slots = max(1, min(slots))
        self._rank_anew(
            joined=self._others.keys() - before.keys(),
            left=before.keys() - self._others.keys(),
            is_resized=least_slots != self._least_slots,
        )
        is_paused = any(
            report.paused_since is not None
            for report in reports
            if report.worker_id in self._others or report.worker_id == self._own
        )
        sights: dict[str, list[tuple[str, LaneReport]]] = defaultdict(list)
        for report in reports:
            # Of one that has just begun to stop for the last time: others take over meanwhile.
            is_last = report.stopping and report.worker_id in before
            if is_last or report.worker_id in self._others or report.worker_id == self._own:
                for lane in report.lanes:
                    sights[lane.run_id].append((report.worker_id, lane))
        for run_id, entry in self._entries.items():
            self._look_after(entry, sights.get(run_id, ()), now)
            if is_paused:
                # Nobody calls, as ordered; after the end of the order each worker has to hear it.
                entry.attended_at = max(entry.attended_at, now + self._grace)

    def _live(self, reports: Sequence[WorkerReport], now: float) -> dict[str, WorkerReport]:
        """Take in the reports; return those of the other workers that are neither silent nor
        stopping."""
        if self._excused:
            self._excused = False
            self._words = {
                name: word._replace(heard_at=now, said_by=now) for name, word in self._words.items()
            }
        named = set()
        for report in reports:
            named.add(report.worker_id)
            known = self._words.get(report.worker_id)
            if known is None or known.report.said_at != report.said_at:
                self._words[report.worker_id] = _Word(report, now, _said_by(report, known, now))
        own = self._words.pop(self._own, None)
        if own is not None:
            self._own_use = own.report.in_use
        # A report that is gone may come back, as from a store that begins empty.
        self._words = {
            name: word
            for name, word in self._words.items()
            if name in named or now - word.said_by < PATIENCE
        }
        return {
            name: word.report
            for name, word in self._words.items()
            if now - word.said_by < PATIENCE and not word.report.stopping
        }

    def _look_after(
        self, entry: _Entry, sights: Sequence[tuple[str, LaneReport]], now: float
    ) -> None:
        """Note whether anybody attends to a run."""
        entry.short = any(lane.reason is RunWaitReason.SLOTS for _, lane in sights)
        entry.calling = {name: lane.calling for name, lane in sights}
        if sights:
            is_attended = any(_attends(lane) for _, lane in sights)
            all_idle = all(lane.empty and not lane.in_flight for _, lane in sights)
            entry.idle_at = frozenset(name for name, _ in sights) if all_idle else frozenset()
        else:
            # Who found a queue empty for long leaves it alone; a long report leaves idle lanes out.
            is_attended = any(name in self._others or name == self._own for name in entry.idle_at)
            is_attended |= any(
                one.lanes_left_out > 0
                for _, name in entry.ranked[: self._least]
                if (one := self._others.get(name)) is not None
            )
        if is_attended:
            entry.attended_at = max(entry.attended_at, now)

    # -- the runs --

    def note(self, run: DispatchableRun, now: float, *, is_news: bool) -> bool:
        """Take in a run that may have work; return whether this worker serves it.

        With `is_news` something has happened to it, so that others look at it anew, too.
        """
        entry = self._entries.get(run.run_id)
        if entry is None:
            entry = _Entry(run, now + self._grace, self._rank(run))
            self._entries[run.run_id] = entry
        elif is_news and entry.idle_at:
            entry.idle_at = frozenset()
            entry.attended_at = now + self._grace
        entry.serves = self._goes_on(entry, now) if entry.serves else self._is_inside(entry, now)
        return entry.serves

    def forget(self, run_id: str) -> None:
        """Drop a run that has no work."""
        self._entries.pop(run_id, None)

    def known(self) -> list[str]:
        """Return all runs that are known."""
        return list(self._entries)

    def elsewhere(self) -> list[DispatchableRun]:
        """Return the runs that other workers serve."""
        return [entry.run for entry in self._entries.values() if not entry.serves]

    def moves(self, now: float) -> Moves:
        """Decide about all runs anew. A run that begins is only named: noting it begins it."""
        begins, leaves = [], []
        for run_id, entry in self._entries.items():
            if entry.serves and not self._goes_on(entry, now):
                entry.serves = False
                leaves.append(run_id)
            elif not entry.serves and self._is_inside(entry, now):
                begins.append(run_id)
        return Moves(begins, leaves)

    def _goes_on(self, entry: _Entry, now: float) -> bool:
        """Return whether this worker still serves a run, which others may have taken over."""
        if self._is_inside(entry, now):
            entry.outside_since = None
        elif entry.outside_since is None:
            entry.outside_since = now
        return entry.outside_since is None or now - entry.outside_since < REST

    def _is_inside(self, entry: _Entry, now: float) -> bool:
        # Of a large fleet nothing is known between two looks at it.
        known_to = now if self._span <= PATIENCE else max(self._heard_at, now - self._span)
        if known_to - entry.attended_at >= PATIENCE:
            return True
        slots = 0
        covered = SPARE * entry.run.max_inflight
        for place, (_, name) in enumerate(entry.ranked):
            if place >= self._least and slots >= covered:
                return entry.short and self._joins(entry, place)
            if name == self._own:
                return True
            slots += self._others[name].slots
        # Behind all workers of which the order is kept.
        return slots < covered or (entry.short and self._joins(entry, len(entry.ranked)))

    def _joins(self, entry: _Entry, place: int) -> bool:
        """Return whether this worker is among the next ones that have the free slots which the
        first ones, those of the subset, lack."""
        if self._room(entry, self._own) <= 0:
            return False
        missing = entry.run.max_inflight
        missing -= sum(self._room(entry, name) for _, name in entry.ranked[:place])
        for name in self._next_ones(entry, place):
            if missing <= 0 or name == self._own:
                return missing > 0
            missing -= self._room(entry, name)
        return False

    def _next_ones(self, entry: _Entry, place: int) -> Iterator[str]:
        """Go through the workers from a place on, beyond those of which the order is kept, too."""
        kept = len(entry.ranked)
        for _, name in entry.ranked[place:]:
            yield name
        if kept <= len(self._others):
            entry.ranked = sorted(
                _scores(entry.run.run_id, [self._own, *self._others]), reverse=True
            )
            for _, name in entry.ranked[kept:]:
                yield name

    def _room(self, entry: _Entry, name: str) -> int:
        """Return the slots of a worker that are free, or used by this run."""
        calling = entry.calling.get(name, 0)
        if name == self._own:
            return self._slots - self._own_use + calling
        member = self._others[name]
        return max(0, member.slots - member.in_use + calling)

    # -- the order of workers --

    def _rank(self, run: DispatchableRun) -> list[tuple[int, str]]:
        scored = _scores(run.run_id, [self._own, *self._others])
        return heapq.nlargest(self._kept(run), scored)

    def _kept(self, run: DispatchableRun) -> int:
        needed = max(self._least, -(-SPARE * run.max_inflight // self._least_slots))
        return max(_LEAST_RANKED, RANKED * needed)

    def _rank_anew(self, *, joined: Iterable[str], left: Iterable[str], is_resized: bool) -> None:
        """Bring the order of each run up to date: that of few runs changes, for few workers."""
        joined, left = list(joined), set(left)
        if not joined and not left and not is_resized:
            return
        for entry in self._entries.values():
            if is_resized or any(name in left for _, name in entry.ranked):
                entry.ranked = self._rank(entry.run)
                continue
            added = _scores(entry.run.run_id, joined)
            entry.ranked = heapq.nlargest(self._kept(entry.run), [*entry.ranked, *added])


def _scores(run_id: str, workers: Iterable[str]) -> list[tuple[int, str]]:
    """Return the score of each worker for a run, the same in every process."""
    of_run = blake2b(run_id.encode(), digest_size=8)
    scored = []
    for worker_id in workers:
        of_both = of_run.copy()
        of_both.update(worker_id.encode())
        scored.append((int.from_bytes(of_both.digest()), worker_id))
    return scored


def _said_by(report: WorkerReport, known: _Word | None, now: float) -> float:
    """Return the latest moment at which a new report can have been said: after a long time without
    a look it may be an old one. The worker's own clock says how much later than the one before, so
    that clocks need not agree."""
    if known is None or now - known.heard_at <= PATIENCE:
        return now
    return min(now, known.heard_at + (report.said_at - known.report.said_at) / 1_000)


def _attends(lane: LaneReport) -> bool:
    """Return whether a worker does what can be done for a run: another one would do no more."""
    in_hand = lane.in_flight or lane.calling or lane.buffered
    return bool(in_hand or lane.empty or lane.reason is not None)
