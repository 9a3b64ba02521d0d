"""The options that say when a job runs: the schedule of the wire, and what no server takes."""

from __future__ import annotations

from typing import Any

import click
import pytest

from conveyor.cli.schedules import schedule_of
from conveyor.domain.schedule import parse_schedule

BERLIN = {"timezone": "Europe/Berlin"}
KINDS = ("every", "at", "daily", "weekly", "monthly", "zone", "overlap")


def flags(**given: str) -> dict[str, Any]:
    return dict.fromkeys(KINDS) | given


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"every": "15m"}, {"rate": {"every": 15, "unit": "minute"}}),
        ({"every": "6h"}, {"rate": {"every": 6, "unit": "hour"}}),
        (
            {"every": "1d", "overlap": "wait"},
            {"rate": {"every": 1, "unit": "day"}, "overlap": "wait"},
        ),
        (
            {"at": "2027-09-01T09:00", "zone": "Europe/Berlin"},
            {"at": "2027-09-01T09:00", **BERLIN},
        ),
        (
            {"daily": "9:00, 18:00", "zone": "Europe/Berlin"},
            {
                "calendar": {"times_of_day": ["09:00", "18:00"], "cadence": {"daily": {}}},
                **BERLIN,
            },
        ),
        (
            {"weekly": "Mon,fri@09:00", "zone": "Europe/Berlin", "overlap": "skip"},
            {
                "calendar": {
                    "times_of_day": ["09:00"],
                    "cadence": {"weekly": {"days": ["mon", "fri"]}},
                },
                **BERLIN,
                "overlap": "skip",
            },
        ),
        (
            {"monthly": "1,15@09:00,10:00", "zone": "Europe/Berlin"},
            {
                "calendar": {
                    "times_of_day": ["09:00", "10:00"],
                    "cadence": {"monthly": {"days": [1, 15]}},
                },
                **BERLIN,
            },
        ),
    ],
)
def test_options_become_a_schedule_that_the_server_reads(
    given: dict[str, str], expected: dict[str, Any]
) -> None:
    left = flags(**given) | {"name": "kept"}

    assert schedule_of(left) == expected
    assert left == {"name": "kept"}
    parse_schedule(expected)


def test_without_options_there_is_no_schedule() -> None:
    assert schedule_of(flags()) is None


@pytest.mark.parametrize(
    ("given", "example"),
    [
        ({"daily": "9"}, "--daily 09:00,18:00"),
        ({"daily": ""}, "--daily 09:00,18:00"),
        ({"weekly": "monday@09:00"}, "--weekly mon,fri@09:00"),
        ({"weekly": "mon@"}, "--weekly mon,fri@09:00"),
        ({"monthly": "32@09:00"}, "--monthly 1,15@09:00"),
        ({"at": "tomorrow"}, "--at 2027-09-01T09:00"),
    ],
)
def test_a_wrong_form_is_told_with_an_example_of_the_right_one(
    given: dict[str, str], example: str
) -> None:
    with pytest.raises(click.UsageError) as caught:
        schedule_of(flags(**given, zone="UTC"))
    assert caught.value.message.endswith(f"; for example: {example}")
    kind, _, value = example.removeprefix("--").partition(" ")
    assert schedule_of(flags(**{kind: value}, zone="UTC"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"zone": "UTC"}, "--zone needs a schedule"),
        ({"overlap": "wait"}, "--overlap needs a schedule"),
        ({"every": "6h", "daily": "09:00"}, "--every and --daily: a job has one schedule"),
        ({"daily": "09:00"}, "--daily needs --zone"),
        ({"weekly": "mon"}, "--weekly takes DAYS@TIMES"),
        ({"at": "2027-09-01T09:00"}, "--at needs --zone"),
        ({"every": "15"}, "--every takes 15m, 6h or 1d, not '15'"),
        ({"every": "15s"}, "--every takes 15m, 6h or 1d"),
        ({"every": "0m"}, "--every: must be a whole number from 1 on"),
        ({"every": "367d"}, "--every: must make at most 366 days"),
        ({"every": "٣h"}, "--every takes"),
        ({"at": "2027-09-01T09:00Z", "zone": "UTC"}, "--at: must be YYYY-MM-DDTHH:MM"),
        ({"at": "2027-02-30T09:00", "zone": "UTC"}, "--at: is no date and time"),
        ({"daily": "09:30", "zone": "UTC"}, "--daily: must be a full hour"),
        ({"daily": "", "zone": "UTC"}, "--daily: must be a full hour"),
        (
            {"weekly": "mon", "zone": "UTC"},
            "--weekly takes DAYS@TIMES, such as mon,fri@09:00, not 'mon'",
        ),
        (
            {"monthly": "1", "zone": "UTC"},
            "--monthly takes DAYS@TIMES, such as 1,15@09:00, not '1'",
        ),
        ({"weekly": "monday@09:00", "zone": "UTC"}, "--weekly: must be one of mon, tue"),
        ({"monthly": "32@09:00", "zone": "UTC"}, "--monthly: must be a whole number from 1 to 31"),
        ({"monthly": "x@09:00", "zone": "UTC"}, "--monthly: must be a whole number from 1 to 31"),
        ({"daily": "09:00", "zone": "Europe/Berln"}, "--zone: must be the name of a zone"),
        ({"daily": "09:00", "zone": "../etc"}, "--zone: must be the name of a zone"),
    ],
)
def test_what_no_server_takes_is_a_mistake_of_use(given: dict[str, str], told: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        schedule_of(flags(**given))
    assert caught.value.message.startswith(told)
