"""The rounds of a benchmark that count, the order in which two versions alternate, and the
claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from bench.rounds import (
    DISTURBED,
    LEAST_PAIRS,
    MOST_FOREIGN,
    NO_COUNTERS,
    QUIET,
    SHORTEST,
    TRIES,
    UNJUDGED,
    Half,
    Pair,
    Reading,
    Round,
    Rounds,
    busy_ticks,
    classify,
    compare,
    foreign_share,
    read_machine,
    take_pairs,
    take_rounds,
    why_not,
    worst,
)

STAT = """\
cpu  1000 20 300 50000 60 7 8 40 500 6
cpu0 500 10 150 25000 30 3 4 20 250 3
intr 12345
"""


def meter(foreign: Iterable[float | None], seconds: float = 10.0) -> Callable[[], Reading]:
    """Readings in pairs: rounds of `seconds`, in which others use these seconds of CPU.

    The benchmark itself uses three quarters of a core. None: the system does not tell.
    """
    shares = iter(foreign)
    now = busy = own = 0.0
    pending: list[float | None] = []

    def read() -> Reading:
        nonlocal now, busy, own
        if not pending:
            pending.append(next(shares))
        else:
            used = pending.pop()
            now += seconds
            own += 0.75 * seconds
            if used is None:
                return Reading(now, None, 0.0)
            busy += 0.75 * seconds + used
        return Reading(now, busy, own)

    return read


def counted(foreign: Iterable[float | None], *, wanted: int) -> tuple[Rounds[int], list[str]]:
    said: list[str] = []
    numbers = iter(range(1_000))
    rounds = take_rounds(
        lambda: next(numbers),
        wanted=wanted,
        label="row",
        describe=lambda number: f"number {number}",
        meter=meter(foreign),
        say=said.append,
    )
    return rounds, said


def test_steal_is_busy_and_interrupts_guests_and_waiting_are_not() -> None:
    assert busy_ticks(STAT) == 1000 + 20 + 300 + 40
    assert busy_ticks("cpu 1 2 3 4") == 6


@pytest.mark.parametrize("stat", ["", "cpu0 1 2 3 4\n", "cpu  0 0 0 0 0 0 0 0 0 0\n"])
def test_a_system_that_counts_nothing_is_told_from_an_idle_one(stat: str) -> None:
    assert busy_ticks(stat) is None


def test_what_others_used_is_the_machine_less_the_benchmark() -> None:
    before = Reading(100.0, 50.0, 20.0)

    assert foreign_share(before, Reading(110.0, 60.0, 29.0)) == pytest.approx(0.1)
    assert foreign_share(before, Reading(110.0, 59.0, 29.5)) == 0.0
    assert foreign_share(before, Reading(110.0, None, 29.0)) is None
    assert foreign_share(before, before) is None


def test_a_round_is_quiet_up_to_the_threshold() -> None:
    before = Reading(0.0, 0.0, 0.0)

    assert classify(before, Reading(16.0, 16.0 * MOST_FOREIGN, 0.0)) == QUIET
    assert classify(before, Reading(16.0, 17.0 * MOST_FOREIGN, 0.0)) == DISTURBED
    assert classify(before, Reading(16.0, None, 0.0)) == UNJUDGED
    assert classify(before, Reading(SHORTEST / 2, 0.0, 0.0)) == UNJUDGED


def test_rounds_go_on_until_enough_were_quiet_and_all_are_printed() -> None:
    rounds, said = counted([0.1, 2.0, 0.0, 9.0, 0.2], wanted=3)

    assert rounds.quiet == [0, 2, 4]
    assert rounds.judged
    assert rounds.counted == "3 of 5"
    assert said == [
        "row, round 1: number 0 (quiet, 10.0 s, others used 1.0% of a core)",
        "row, round 2: number 1 (disturbed, 10.0 s, others used 20.0% of a core)",
        "row, round 3: number 2 (quiet, 10.0 s, others used 0.0% of a core)",
        "row, round 4: number 3 (disturbed, 10.0 s, others used 90.0% of a core)",
        "row, round 5: number 4 (quiet, 10.0 s, others used 2.0% of a core)",
    ]


def test_a_machine_that_is_never_quiet_is_given_up() -> None:
    rounds, said = counted([0.0, *[5.0] * 50], wanted=2)

    assert len(rounds.every) == 2 * TRIES
    assert not rounds.judged
    assert said[-1] == "row: not judged, 1 of 6 rounds were quiet and 2 were wanted"


def test_without_counters_rounds_are_unjudged_and_not_repeated() -> None:
    rounds, said = counted([None] * 50, wanted=3)

    assert [taken.kind for taken in rounds.every] == [UNJUDGED] * 3
    assert not rounds.judged
    assert said[0] == "row, round 1: number 0 (unjudged, 10.0 s, others used ? of a core)"
    assert said[-1] == f"row: not judged, {NO_COUNTERS}"


def test_rounds_too_short_to_judge_say_so() -> None:
    rounds = Rounds([Round(1, UNJUDGED, 0.0, 0.1)], 1)

    assert why_not(rounds) == ("the rounds were shorter than 0.5 s or used less than 0.5 s of CPU")


def halves(calls: list[str], name: str, costs: Iterable[float]) -> Callable[[], Half]:
    given = iter(costs)

    def half() -> Half:
        calls.append(name)
        return Half(1_000, next(given), 1.0)

    return half


def pairs(
    base: Iterable[float], this: Iterable[float], foreign: Iterable[float | None], wanted: int = 5
) -> tuple[Rounds[Pair], list[str]]:
    calls: list[str] = []
    taken = take_pairs(
        halves(calls, "A", base),
        halves(calls, "B", this),
        wanted=wanted,
        label="row",
        meter=meter(foreign),
        say=lambda _line: None,
    )
    return taken, calls


def test_versions_take_turns_and_a_pair_is_quiet_only_if_both_halves_are() -> None:
    foreign = [0.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0, 0.0]
    taken, calls = pairs([1.0] * 4, [2.0] * 4, foreign, wanted=2)

    assert "".join(calls) == "ABABABAB"
    assert [pair.kind for pair in taken.every] == [QUIET, DISTURBED, DISTURBED, QUIET]
    assert [pair.foreign for pair in taken.every] == pytest.approx([0.0, 0.3, 0.3, 0.0])
    assert taken.counted == "2 of 4"


def test_a_half_that_used_hardly_any_cpu_is_not_judged() -> None:
    taken, _calls = pairs([0.0, 0.1], [1.0, 1.0], [0.0] * 4, wanted=2)

    assert [pair.kind for pair in taken.every] == [UNJUDGED, UNJUDGED]
    assert math.isnan(taken.every[0].value.ratio)


def test_a_pair_is_as_bad_as_its_worse_half() -> None:
    assert worst([QUIET, QUIET]) == QUIET
    assert worst([QUIET, UNJUDGED]) == UNJUDGED
    assert worst([UNJUDGED, DISTURBED]) == DISTURBED


def test_the_comparison_is_of_quiet_pairs_alone() -> None:
    base = [100.0, 100.0, 9_999.0, 110.0, 120.0, 100.0]
    this = [80.0, 90.0, 1.0, 88.0, 108.0, 70.0]
    taken, _calls = pairs(base, this, [0.0] * 4 + [9.0, 0.0] + [0.0] * 6)
    found = compare(taken)

    assert found is not None
    assert (found.base_cost, found.this_cost) == pytest.approx((100_000.0, 88_000.0))
    assert found.ratio_of_medians == pytest.approx(0.88)
    assert found.median_ratio == pytest.approx(0.8)
    assert (found.least, found.most) == pytest.approx((0.7, 0.9))
    assert found.verdict == "costs less"


def test_rates_are_compared_pair_by_pair_too() -> None:
    def pair(base: float, this: float) -> Round[Pair]:
        sides = [Half(1_000, 1.0, seconds) for seconds in (base, this)]
        return Round(Pair(sides[0], sides[1]), QUIET, 0.0, base + this)

    taken = [pair(10.0, 8.0), pair(10.0, 5.0), pair(10.0, 12.5), pair(20.0, 16.0), pair(1.0, 1.0)]
    found = compare(Rounds(taken, 5))

    assert found is not None
    assert found.speed == pytest.approx(1.25)
    assert (found.least_speed, found.most_speed) == pytest.approx((0.8, 2.0))


@pytest.mark.parametrize(
    ("this", "verdict"),
    [
        ([1.1, 1.2, 1.3, 1.4, 1.5], "costs more"),
        ([0.9, 0.9, 0.9, 0.9, 1.1], "undecided"),
        ([0.9, 0.9, 0.9, 0.9, 1.0], "undecided"),
    ],
)
def test_a_verdict_needs_every_pair_on_one_side(this: list[float], verdict: str) -> None:
    found = compare(pairs([1.0] * 5, this, [0.0] * 10)[0])

    assert found is not None
    assert found.verdict == verdict


def test_too_few_quiet_pairs_are_not_judged() -> None:
    few, _calls = pairs([1.0] * 50, [1.0] * 50, [0.0] * 8 + [9.0] * 50)
    fewer_wanted, _calls = pairs([1.0] * 4, [1.0] * 4, [0.0] * 8, wanted=LEAST_PAIRS - 1)

    assert len(few.quiet) == LEAST_PAIRS - 1
    assert len(few.every) == TRIES * LEAST_PAIRS
    assert compare(few) is None
    assert compare(fewer_wanted) is None


def test_a_real_reading_counts_this_process() -> None:
    before = read_machine()
    if before.busy is None:
        pytest.skip(NO_COUNTERS)
    sum(range(3_000_000))
    after = read_machine()

    assert after.clock > before.clock
    assert after.own >= before.own > 0
