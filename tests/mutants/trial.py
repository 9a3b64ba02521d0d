"""Try a mutant: run the tests that pass its line, until one of them fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from tests.mutants.changes import Mutant
from tests.mutants.coverage_map import CoverageMap
from tests.mutants.trees import Tree

FIRST_SECONDS = 10.0
"""Seconds of tests, as they were watched, in the first of the two runs of a mutant."""
MOST_SECONDS = 100.0
"""The same in both."""
FIRST_MODULES = 6
SLOWNESS = 2
"""Times as long as it was watched that a test may take before the mutant counts as hanging."""
START_SECONDS = 60.0
NOT_FOUND = "ERROR: not found"


class Outcome(StrEnum):
    """The outcome of a trial."""

    CAUGHT = "caught"
    HANGS = "hangs"
    SURVIVED = "survived"
    UNTESTED = "untested"


class Trial(msgspec.Struct, frozen=True):
    """A mutant and what became of it; `by` is the test that failed."""

    path: str
    function: str
    line: str
    change: str
    nth: int
    outcome: Outcome
    tests: int
    by: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The same as of the mutant."""
        return self.path, self.function, self.line, self.change, self.nth

    @property
    def is_caught(self) -> bool:
        """Tell whether a test failed, or hung."""
        return self.outcome in (Outcome.CAUGHT, Outcome.HANGS)


def try_mutant(mutant: Mutant, tree: Tree, seen: CoverageMap) -> Trial:
    """Change the tree, run the tests, and change it back."""
    # The working tree may have changed since the copies were made.
    source = (tree.root / mutant.path).read_text(encoding="utf-8")
    tests = seen.tests_of(mutant)
    outcome, by = Outcome.SURVIVED if tests else Outcome.UNTESTED, ""
    tree.write(mutant.path, mutant.apply(source))
    try:
        for part in _parts(tests, seen):
            outcome, by = _run(part, tree, seen)
            if outcome is not Outcome.SURVIVED:
                break
    finally:
        tree.write(mutant.path, source)
    return Trial(*mutant.key, outcome=outcome, tests=len(tests), by=by)


def _parts(tests: list[str], seen: CoverageMap) -> Iterator[list[str]]:
    """Yield first the quick tests of the modules nearest to the change, then the others."""
    nearest = list(dict.fromkeys(_module(test) for test in tests))[:FIRST_MODULES]
    first: list[str] = []
    rest: list[str] = []
    spent = 0.0
    for test in tests:
        if _module(test) in nearest and spent + seen.seconds[test] <= FIRST_SECONDS:
            spent += seen.seconds[test]
            first.append(test)
        else:
            rest.append(test)
    if first:
        yield first
    second = []
    for test in sorted(rest, key=lambda test: seen.seconds[test]):
        spent += seen.seconds[test]
        if spent > MOST_SECONDS:
            break
        second.append(test)
    if second:
        yield second


def _module(test: str) -> str:
    return test.partition("::")[0]


def _run(tests: list[str], tree: Tree, seen: CoverageMap) -> tuple[Outcome, str]:
    longest = START_SECONDS + SLOWNESS * sum(seen.seconds[test] for test in tests)
    code, output = _pytest(tests, tree, longest)
    if NOT_FOUND in output:
        # A changed constant renames the tests whose parameters are made of it.
        functions = list(dict.fromkeys(test.partition("[")[0] for test in tests))
        code, output = _pytest(functions, tree, longest)
    if code is None:
        return Outcome.HANGS, ""
    if code in (0, 5):
        return Outcome.SURVIVED, ""
    if NOT_FOUND in output:
        raise RuntimeError(f"tests are gone that were there when watched: {output[-2_000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return Outcome.CAUGHT, failed[1] if failed else f"pytest ended with {code}"


def _pytest(tests: list[str], tree: Tree, longest: float) -> tuple[int | None, str]:
    chosen = tree.root.with_suffix(".tests")
    chosen.write_text("\n".join(tests), encoding="utf-8")
    return tree.pytest(["-x", "--tb=no", "-rfE", f"@{chosen}"], seconds=longest)
