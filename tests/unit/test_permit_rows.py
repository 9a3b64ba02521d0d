"""A process's conclusions from a ledger's row that it has watched for a while."""

from __future__ import annotations

from conveyor.ports.permits import LeaseRequest
from conveyor.prod.dynamodb.client import Item
from conveyor.prod.dynamodb.permits import (
    MOST_LAPSED,
    MOST_REMOVED,
    LeaseRow,
    LedgerWrite,
    RowWatch,
)

LEASE = 30_000


def row(counts: dict[str, int], *, stamp: str = "s", generation: str = "g") -> Item:
    return {
        "generation": generation,
        "entries": {
            holder: LeaseRow(
                count=count, sequence=5, wants=False, lease=LEASE, stamp=f"{stamp}{holder}"
            ).attributes()
            for holder, count in counts.items()
        },
    }


def asks(count: int, *, holder: str = "me", sequence: int = 6) -> LeaseRequest:
    return LeaseRequest(job_id="JOB", holder=holder, count=count, before=0, sequence=sequence)


def test_lapsed_entries_that_one_write_cannot_remove_are_counted() -> None:
    watch = RowWatch()
    watch.observe(row({f"dead-{number}": 1 for number in range(MOST_REMOVED + 5)}), 0.0)
    assert watch.plan(asks(6), 10, 30.0) is None
    plan = watch.plan(asks(5), 10, 30.0)
    assert plan is not None
    assert len(plan.removed) == MOST_REMOVED
    assert plan.generation == "g"


def test_an_entry_lapses_for_who_has_watched_it_unchanged_for_its_lease() -> None:
    watch = RowWatch()
    watch.observe(row({"other": 10}), 100.0)
    watch.observe(row({"other": 10}), 129.0)
    assert watch.plan(asks(1), 10, 129.999) is None
    assert watch.plan(asks(1), 10, 130.0) == LedgerWrite(None, "g", {"other": "sother"})
    watch.observe(row({"other": 10}, stamp="t"), 130.0)
    assert watch.plan(asks(1), 10, 159.999) is None
    assert watch.plan(asks(1), 10, 160.0) == LedgerWrite(None, "g", {"other": "tother"})


def test_an_entry_that_was_gone_and_is_there_again_is_watched_anew() -> None:
    watch = RowWatch()
    watch.observe(row({"other": 10}), 0.0)
    watch.observe(row({}), 10.0)
    watch.observe(row({"other": 10}), 20.0)
    assert watch.plan(asks(1), 10, 49.999) is None
    assert watch.plan(asks(1), 10, 50.0) is not None


def test_renewing_and_giving_back_hang_on_ones_own_entry_alone() -> None:
    watch = RowWatch()
    watch.observe(row({"me": 4, "other": 6}), 0.0)
    assert watch.plan(asks(4), 5, 1.0) == LedgerWrite("sme", None, {})
    assert watch.plan(asks(0), 5, 1.0) == LedgerWrite("sme", None, {})
    assert watch.plan(asks(5), 10, 1.0) is None
    assert watch.plan(asks(5), 11, 1.0) == LedgerWrite("sme", "g", {})
    assert watch.plan(asks(4, sequence=5), 11, 1.0) is None


def test_renewals_remove_lapsed_entries_once_these_are_most_of_the_row() -> None:
    watch = RowWatch()
    dead = {f"dead-{number:02}": 1 for number in range(MOST_LAPSED)}
    watch.observe(row({"me": 4, **dead}), 0.0)
    assert watch.plan(asks(4, sequence=6), 5, 0.0) == LedgerWrite("sme", None, {})
    mine = row({"me": 4}, stamp="t")["entries"]
    seen = row({**dead, "dead-99": 1})
    watch.observe({**seen, "entries": {**seen["entries"], **mine}}, 20.0)
    # Those that were there before have lapsed.
    few = watch.plan(asks(4, sequence=6), 5, 30.0)
    assert few == LedgerWrite("tme", None, {})
    renewed = row({"me": 4}, stamp="u")["entries"]
    watch.observe({**seen, "entries": {**seen["entries"], **renewed}}, 45.0)
    many = watch.plan(asks(4, sequence=6), 5, 50.0)
    assert many is not None
    assert (len(many.removed), many.generation) == (MOST_LAPSED + 1, None)
    assert "me" not in many.removed


def test_ones_own_lapsed_entry_is_replaced_and_its_sequence_forgotten() -> None:
    watch = RowWatch()
    watch.observe(row({"me": 4}), 0.0)
    assert watch.plan(asks(4, sequence=1), 10, 30.0) == LedgerWrite("sme", "g", {})
    assert watch.plan(asks(11, sequence=1), 10, 30.0) is None


def test_without_a_row_nobody_holds_anything() -> None:
    watch = RowWatch()
    watch.observe(None, 0.0)
    assert watch.plan(asks(10), 10, 0.0) == LedgerWrite(None, None, {})
    assert watch.plan(asks(11), 10, 0.0) is None
    standing = watch.ledger_state(granted=False, limit=10, now=0.0)
    assert (standing.free, standing.holders, standing.wanting) == (10, 0, 0)
