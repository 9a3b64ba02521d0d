"""The program that changes the core: its changes, its draw, its count."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.architecture.source import ROOT
from tests.mutants.changes import Mutant, mutants_of
from tests.mutants.core import ROOMS, Equivalent, drawn, equivalents, every_mutant
from tests.mutants.coverage_map import CoverageMap
from tests.mutants.report import Tally, document
from tests.mutants.trial import Outcome, Trial

SOURCE = '''"""A module."""

LIMIT = 3
Either = int | None


@dataclass(frozen=True)
class Thing:
    """A class."""

    count: int = 2

    def grow(self, by: int = 1) -> int | None:
        """Grow."""
        _log.warning("growing %d", 5)
        if by <= 0 and not self.full:
            return
        for one in (x for x in y if x.good):
            if one is None:
                continue
            self.count += min(by, LIMIT)
        self.told.append("text" + "é")
        while self.count not in seen: self.step(by - 1)
        raise ValueError
'''


@pytest.fixture(scope="module")
def core() -> list[Mutant]:
    return every_mutant()


def changes(source: str) -> list[tuple[str, str]]:
    return [(one.change, one.function) for one in mutants_of("a.py", source)]


def test_every_kind_of_change_is_found_and_nothing_else() -> None:
    grow = "Thing.grow"

    assert sorted(changes(SOURCE)) == sorted(
        [
            ("3 becomes 4", ""),
            ("2 becomes 3", "Thing"),
            ("1 becomes 2", grow),
            ("negated", grow),
            ("<= becomes <", grow),
            ("0 becomes 1", grow),
            ("and becomes or", grow),
            ("without not", grow),
            ("without return", grow),
            ("negated", grow),
            ("is becomes is not", grow),
            ("without continue", grow),
            ("without the assignment", grow),
            ("min becomes max", grow),
            ("without the call", grow),
            ("not in becomes in", grow),
            ("without the call", grow),
            ("- becomes +", grow),
            ("1 becomes 2", grow),
            ("without raise", grow),
        ]
    )


def test_a_change_is_made_at_its_place_and_nowhere_else() -> None:
    for one in mutants_of("a.py", SOURCE):
        changed = one.apply(SOURCE)
        ast.parse(changed)
        assert changed != SOURCE
        before, after = SOURCE.split("\n"), changed.split("\n")
        assert [new for old, new in zip(before, after, strict=True) if old != new] != []
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    [call] = [one for one in mutants_of("a.py", SOURCE) if "self.told" in one.text]
    assert "        pass\n        while" in call.apply(SOURCE)


@pytest.mark.slow
def test_every_change_of_the_core_can_be_compiled_and_has_a_name_of_its_own(
    core: list[Mutant],
) -> None:
    sources = {path: (ROOT / path).read_text() for path in {one.path for one in core}}

    assert len({one.key for one in core}) == len(core) > 5_000
    for one in drawn(core, seed=1, count=200):
        compile(one.apply(sources[one.path]), one.path, "exec")


def test_an_edit_changes_the_draw_of_no_other_line() -> None:
    before = mutants_of("a.py", SOURCE)
    after = mutants_of("a.py", SOURCE.replace("LIMIT = 3", "\n\nLIMIT = 30"))

    def keys(mutants: list[Mutant]) -> list[tuple[str, str, str, str, int]]:
        return [one.key for one in mutants if one.function]

    few = 12
    order = keys(drawn(before, seed=15, count=few))
    assert keys(drawn(before, seed=15, count=few)) == order
    assert keys(drawn(before, seed=16, count=few)) != order
    assert [key for key in keys(drawn(after, seed=15, count=99)) if key in order] == order


@pytest.mark.slow
def test_each_equivalent_change_stands_in_the_core_with_a_reason(core: list[Mutant]) -> None:
    known = equivalents()
    mutants = {one.key for one in core}

    assert [one for one in known if one.key not in mutants] == []
    assert len({one.key for one in known}) == len(known)
    assert all(len(one.reason.split()) >= 4 for one in known)


def trial(line: str, outcome: Outcome) -> Trial:
    return Trial("conveyor/wire/a.py", "f", line, "negated", 0, outcome, tests=1)


def test_the_ratio_counts_no_equivalent_mutant_and_no_caught_one_as_equivalent() -> None:
    trials = [trial(f"line {number}", Outcome.CAUGHT) for number in range(6)]
    trials += [trial("hangs", Outcome.HANGS), trial("same", Outcome.SURVIVED)]
    trials += [trial("left", Outcome.SURVIVED), trial("alone", Outcome.UNTESTED)]
    known = [
        Equivalent("conveyor/wire/a.py", "f", line, "negated", "it makes no difference")
        for line in ("same", "line 1", "elsewhere")
    ]
    tally = Tally(trials, known)

    assert (tally.caught, len(tally.equivalent), len(tally.survivors)) == (7, 1, 2)
    assert tally.ratio == pytest.approx(7 / 9)
    page = document(tally, seed=4)
    assert "Seed 4. 10 mutants: 7 caught, 1 equivalent, 2 survived" in page
    assert "| `wire` | 10 | 7 | 1 | 2 |" in page
    assert re.findall("^- .*`(.*)`, negated", page, re.MULTILINE) == ["alone", "left", "same"]


@pytest.mark.slow
def test_every_room_of_the_core_is_changed(core: list[Mutant]) -> None:
    paths = {one.path for one in core}

    for room in ROOMS:
        assert any(path.startswith(f"conveyor/{room}/") for path in paths)


COROUTINE = """async def work(self):
    await self.first()
    self.second()


def other(self):
    self.first()
    self.third()
"""


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        ("self.second()", ["exact", "quick", "slow"]),
        ("self.third()", ["third"]),
    ],
)
def test_tests_of_a_coroutine_come_behind_those_that_were_seen_to_pass_the_line(
    tmp_path: Path, text: str, tests: list[str]
) -> None:
    module = "tests/unit/test_work.py"
    lines = {"slow": [1, 2], "exact": [1, 2, 3], "quick": [1, 2], "third": [6, 7, 8], "gone": [3]}
    seconds = {"slow": 2.0, "exact": 3.0, "quick": 1.0, "third": 1.0}
    data = CoverageData(str(tmp_path / "work.coverage"))
    for test, passed in lines.items():
        data.set_context(f"{module}::{test}")
        data.add_lines({"conveyor/aio/work.py": passed})
    data.write()
    seen = CoverageMap(
        {module: tmp_path / "work.coverage"},
        {f"{module}::{test}": spent for test, spent in seconds.items()},
    )
    [removed] = [one for one in mutants_of("conveyor/aio/work.py", COROUTINE) if one.text == text]

    assert seen.tests_of(removed) == [f"{module}::{test}" for test in tests]
