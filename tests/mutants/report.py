"""Say what became of the mutants: the ratio, a table by room, the survivors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import ROOT
from tests.mutants.core import ROOMS, Equivalent
from tests.mutants.trial import Trial

DOCUMENT = ROOT / "docs" / "mutants.md"

_INTRODUCTION = """\
# Mutants

`./scripts/mutants` makes small changes of the core one by one, and runs the tests that pass the
changed line. A change that no test notices has survived. It writes this page;
[testing](testing.md#mutants) describes the run."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The trials of a run, counted."""

    trials: Sequence[Trial]
    equivalents: Sequence[Equivalent]

    @property
    def equivalent(self) -> list[Trial]:
        """The survivors that no test can notice."""
        known = {one.key for one in self.equivalents}
        return [trial for trial in self.trials if not trial.is_caught and trial.key in known]

    @property
    def survivors(self) -> list[Trial]:
        """The mutants that a test should have noticed."""
        known = {one.key for one in self.equivalents}
        return [trial for trial in self.trials if not trial.is_caught and trial.key not in known]

    @property
    def caught(self) -> int:
        """Count the mutants that a test noticed."""
        return sum(trial.is_caught for trial in self.trials)

    @property
    def ratio(self) -> float:
        """The share of the mutants caught, of those that are not equivalent."""
        matter = self.caught + len(self.survivors)
        return self.caught / matter if matter else 1.0

    def summary(self) -> str:
        """Render the counts in one line."""
        return (
            f"{len(self.trials)} mutants: {self.caught} caught, {len(self.equivalent)} equivalent, "
            f"{len(self.survivors)} survived; caught of those that matter: {self.ratio:.3f}"
        )


def document(tally: Tally, *, seed: int) -> str:
    """Render the page."""
    lines = [_INTRODUCTION, "", f"Seed {seed}. {tally.summary()}.", ""]
    lines += ["| Room | Mutants | Caught | Equivalent | Survived |", "|---|---:|---:|---:|---:|"]
    drawn = Counter(_room(trial) for trial in tally.trials)
    caught = Counter(_room(trial) for trial in tally.trials if trial.is_caught)
    equivalent = Counter(map(_room, tally.equivalent))
    survived = Counter(map(_room, tally.survivors))
    for room in ROOMS:
        if drawn[room]:
            counts = drawn[room], caught[room], equivalent[room], survived[room]
            lines.append(f"| `{room}` | {' | '.join(map(str, counts))} |")
    lines += ["", "## Survivors", ""]
    lines += [f"- {described(trial)}" for trial in _sorted(tally.survivors)] or ["None."]
    lines += ["", "## Equivalent mutants", ""]
    reasons = {one.key: one.reason for one in tally.equivalents}
    lines += [
        f"- {described(trial)}: {reasons[trial.key]}" for trial in _sorted(tally.equivalent)
    ] or ["None."]
    return "\n".join(lines) + "\n"


def described(trial: Trial) -> str:
    """Render one mutant in one line."""
    return f"`{trial.path}` {trial.function}: `{trial.line}`, {trial.change}"


def write(tally: Tally, *, seed: int, file: Path = DOCUMENT) -> None:
    """Write the page."""
    file.write_text(document(tally, seed=seed), encoding="utf-8")


def _sorted(trials: Sequence[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: trial.key)


def _room(trial: Trial) -> str:
    inner = trial.path.removeprefix("conveyor/")
    return next(room for room in ROOMS if inner.startswith(f"{room}/"))
