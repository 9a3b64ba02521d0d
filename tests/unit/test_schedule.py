"""The fires of schedules, on days when clocks change too, held against two oracles."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from importlib import resources
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
import whenever

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.schedule import (
    Calendar,
    Rate,
    Schedule,
    local_time,
    next_fire,
    next_fires,
    parse_schedule,
    upcoming,
    zone_names,
    zone_of,
)

MINUTE, DAY = 60_000, 86_400_000


@pytest.fixture(scope="module", autouse=True)
def _same_rules() -> Iterator[None]:
    """The oracle reads the files that we read."""
    whenever.reset_tzpath([str(resources.files("tzdata").joinpath("zoneinfo"))])
    whenever.clear_tzcache()
    yield
    whenever.reset_tzpath()
    whenever.clear_tzcache()


def milliseconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000)


def daily(*hours: int) -> Calendar:
    return Calendar(hours)


TABLE = [
    # A time that a day lacks is read with the offset before the gap.
    ("Europe/Berlin", daily(2), "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
    ("Europe/Berlin", daily(3), "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T01:00"]),
    ("Europe/Berlin", daily(2, 3), "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
    ("America/New_York", daily(2), "2026-03-07T12:00", ["2026-03-08T07:00", "2026-03-09T06:00"]),
    ("America/Santiago", daily(0), "2026-09-05T12:00", ["2026-09-06T04:00", "2026-09-07T03:00"]),
    ("Australia/Lord_Howe", daily(2), "2026-10-03T00:00", ["2026-10-03T15:30", "2026-10-04T15:00"]),
    ("Africa/Cairo", daily(0), "2026-04-23T00:00", ["2026-04-23T22:00", "2026-04-24T21:00"]),
    ("Antarctica/Troll", daily(1), "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-29T23:00"]),
    ("Antarctica/Troll", daily(2), "2026-03-28T12:00", ["2026-03-29T02:00", "2026-03-30T00:00"]),
    ("Pacific/Chatham", daily(2), "2026-09-26T00:00", ["2026-09-26T13:15", "2026-09-27T12:15"]),
    ("America/Nuuk", daily(22), "2026-03-28T12:00", ["2026-03-29T00:00", "2026-03-29T23:00"]),
    ("America/Nuuk", daily(23), "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
    # A time that a day has twice is its first.
    ("Europe/Berlin", daily(2), "2026-10-24T12:00", ["2026-10-25T00:00", "2026-10-26T01:00"]),
    ("America/New_York", daily(1), "2026-10-31T12:00", ["2026-11-01T05:00", "2026-11-02T06:00"]),
    ("America/Santiago", daily(23), "2026-04-04T12:00", ["2026-04-05T02:00", "2026-04-06T03:00"]),
    ("Australia/Lord_Howe", daily(1), "2026-04-04T00:00", ["2026-04-04T14:00", "2026-04-05T14:30"]),
    ("Africa/Cairo", daily(23), "2026-10-29T12:00", ["2026-10-29T20:00", "2026-10-30T21:00"]),
    ("Antarctica/Troll", daily(1), "2026-10-24T12:00", ["2026-10-24T23:00", "2026-10-26T01:00"]),
    ("Pacific/Chatham", daily(3), "2026-04-04T00:00", ["2026-04-04T13:15", "2026-04-05T14:15"]),
    # Ramadan: the clock goes back for a month, and forth again.
    ("Africa/Casablanca", daily(2), "2026-02-14T12:00", ["2026-02-15T01:00", "2026-02-16T02:00"]),
    ("Africa/Casablanca", daily(2), "2026-03-21T12:00", ["2026-03-22T02:00", "2026-03-23T01:00"]),
    # Samoa had no 30 December in 2011: both days fall on one instant, and fire once.
    (
        "Pacific/Apia",
        daily(9),
        "2011-12-29T12:00",
        ["2011-12-29T19:00", "2011-12-30T19:00", "2011-12-31T19:00"],
    ),
    # No change at all, and an offset that is no whole hour.
    ("Asia/Kolkata", daily(9, 18), "2026-03-28T12:00", ["2026-03-28T12:30", "2026-03-29T03:30"]),
    # Days that a month lacks are passed over.
    (
        "Europe/Berlin",
        Calendar((9,), month_days=(29, 31)),
        "2026-01-31T12:00",
        ["2026-03-29T07:00", "2026-03-31T07:00", "2026-04-29T07:00", "2026-05-29T07:00"],
    ),
    ("UTC", Calendar((0,), month_days=(29,)), "2028-02-01T00:00", ["2028-02-29T00:00"]),
    (
        "UTC",
        Calendar((0,), month_days=(31,)),
        "2025-12-31T00:00",
        ["2026-01-31T00:00", "2026-03-31T00:00"],
    ),
    (
        "America/New_York",
        Calendar((9,), weekdays=(0, 4)),
        "2026-11-01T12:00",
        ["2026-11-02T14:00", "2026-11-06T14:00", "2026-11-09T14:00"],
    ),
]


@pytest.mark.parametrize(("zone", "calendar", "after", "instants"), TABLE)
def test_the_table_of_zones(
    zone: str, calendar: Calendar, after: str, instants: Sequence[str]
) -> None:
    schedule = Schedule(calendar=calendar, timezone=zone)
    fires = upcoming(schedule, after=milliseconds(after), anchor=0, count=len(instants))

    assert len(TABLE) >= 24
    assert [fire.instant for fire in fires] == [milliseconds(text) for text in instants]


def by_whenever(schedule: Schedule, after: int) -> int:
    """The next fire by another library: each nominal time of the days around, resolved by it."""
    calendar = schedule.calendar
    assert calendar is not None
    first = datetime.fromtimestamp(after / 1_000, UTC).date() - timedelta(days=3)
    found = []
    for day in (first + timedelta(days=number) for number in range(70)):
        if not calendar.has(day):
            continue
        for hour in calendar.hours:
            nominal = whenever.PlainDateTime(day.year, day.month, day.day, hour)
            zoned = nominal.assume_tz(schedule.timezone or "UTC", disambiguation="compatible")
            found.append(zoned.timestamp(unit="millisecond"))
    return min(instant for instant in found if instant > after)


class Walk:
    """The clock of a zone, looked at each minute over a span: another oracle.

    It notes where the offset changes, and resolves a nominal time by that alone.
    """

    days = 80

    def __init__(self, zone: ZoneInfo, first: datetime) -> None:
        self.first = first
        begin = milliseconds(first.isoformat())
        self._parts: list[tuple[int, int]] = []
        offset = None
        for minute in range(begin, begin + self.days * DAY, MINUTE):
            moment = datetime.fromtimestamp(minute / 1_000, zone)
            now = milliseconds(moment.replace(tzinfo=UTC).isoformat()) - minute
            if now != offset:
                self._parts.append((minute, now))
                offset = now
        self._end = begin + self.days * DAY

    def instant(self, nominal: datetime) -> int:
        """The first instant at which the clock shows a time; of one that it skips, the instant at
        which it would have shown it."""
        shown = milliseconds(nominal.isoformat())
        ends = [*(begin for begin, _ in self._parts[1:]), self._end]
        for (begin, offset), end in zip(self._parts, ends, strict=True):
            if begin <= shown - offset < end:
                return shown - offset
        for (_, before), (begin, after) in pairwise(self._parts):
            if begin + before <= shown < begin + after:
                return shown - before
        raise AssertionError("the walk was too short")

    def next_fire(self, calendar: Calendar, after: int) -> int:
        """The first fire of a calendar later than an instant in the first part of the walk."""
        days = (self.first.date() + timedelta(days=number) for number in range(2, self.days - 2))
        found = (
            self.instant(datetime.combine(day, time(hour)))
            for day in days
            if calendar.has(day)
            for hour in calendar.hours
        )
        return min(instant for instant in found if instant > after)


def drawn_calendar(draw: random.Random) -> Calendar:
    hours = tuple(sorted(draw.sample(range(24), draw.randint(1, 3))))
    kind = draw.randrange(3)
    if kind == 0:
        return Calendar(hours)
    if kind == 1:
        return Calendar(hours, weekdays=tuple(sorted(draw.sample(range(7), draw.randint(1, 3)))))
    return Calendar(hours, month_days=tuple(sorted(draw.sample(range(1, 32), draw.randint(1, 3)))))


@pytest.mark.parametrize(
    ("seed", "spans"),
    [
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 40, marks=pytest.mark.full),
    ],
)
def test_fires_are_those_of_two_oracles(seed: int, spans: int) -> None:
    """500 schedules in each span; 20,000 in all in the longer run."""
    draw = random.Random(seed)
    names = sorted(zone_names())
    for _ in range(spans):
        name = draw.choice(names)
        first = datetime(draw.randint(1_975, 2_036), draw.randint(1, 12), draw.randint(1, 28))
        walk, begin = Walk(zone_of(name), first), milliseconds(first.isoformat())
        for _ in range(500):
            schedule = Schedule(calendar=drawn_calendar(draw), timezone=name)
            after = begin + draw.randrange(4 * DAY, 12 * DAY)
            fire = next_fire(schedule, after=after, anchor=0)

            assert fire is not None
            assert fire.instant > after
            assert schedule.calendar is not None
            assert fire.instant == by_whenever(schedule, after), (name, schedule, after)
            assert fire.instant == walk.next_fire(schedule.calendar, after), (name, schedule)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Pacific/Apia", "Australia/Lord_Howe", "UTC"])
def test_a_daily_time_fires_once_a_day_and_the_sequence_grows(zone: str) -> None:
    schedule = Schedule(calendar=daily(2), timezone=zone)
    after = milliseconds("2011-06-01T00:00")
    fires = list(islice(next_fires(schedule, after=after, anchor=0), 400))

    assert all(one.instant < next_one.instant for one, next_one in pairwise(fires))
    days = [datetime.fromisoformat(fire.nominal).date() for fire in fires]
    skipped = {datetime(2_011, 12, 31).date()} if zone == "Pacific/Apia" else set()
    assert set(days) == {days[0] + timedelta(days=n) for n in range(400 + len(skipped))} - skipped
    again = [next_fire(schedule, after=fire.instant - 1, anchor=0) for fire in fires[:50]]
    assert [(one.instant, one.nominal) for one in again if one] == [
        (fire.instant, fire.nominal) for fire in fires[:50]
    ]


def test_a_rate_counts_from_its_anchor_without_drift() -> None:
    schedule = Schedule(rate=Rate(90, "minute"), timezone="Europe/Berlin")
    anchor = milliseconds("2026-03-28T23:59:59.123")

    def instants(after: int) -> list[int]:
        return [one.instant for one in upcoming(schedule, after=after, anchor=anchor, count=3)]

    assert instants(anchor) == [anchor + k * 90 * MINUTE for k in (1, 2, 3)]
    assert instants(anchor - DAY) == instants(anchor)
    assert instants(anchor + 90 * MINUTE) == [anchor + k * 90 * MINUTE for k in (2, 3, 4)]
    assert instants(anchor + 400 * DAY)[0] == anchor + 400 * DAY + 90 * MINUTE


def test_a_fire_of_a_rate_is_named_to_the_second() -> None:
    schedule = Schedule(rate=Rate(90, "minute"))
    fire = next_fire(schedule, after=0, anchor=milliseconds("2026-03-28T23:59:59.123"))
    assert fire is not None
    assert fire.nominal == local_time(fire.instant, None)
    assert fire.nominal.endswith(":59+00:00")


def test_a_single_time_fires_once() -> None:
    schedule = Schedule(at="2026-03-29T02:30", timezone="Europe/Berlin")
    instant = milliseconds("2026-03-29T01:30")

    assert [fire.instant for fire in upcoming(schedule, after=0, anchor=0, count=3)] == [instant]
    assert next_fire(schedule, after=instant, anchor=0) is None
    assert local_time(instant, "Europe/Berlin") == "2026-03-29T03:30:00+02:00"
    assert local_time(instant, None) == "2026-03-29T01:30:00+00:00"


@pytest.mark.parametrize(
    ("zone", "hour", "after", "note"),
    [
        (
            "Europe/Berlin",
            2,
            "2026-03-28T12:00",
            "02:00 does not exist on this day: it fires at 03:00",
        ),
        (
            "Europe/Berlin",
            2,
            "2026-10-24T12:00",
            "02:00 exists twice on this day: it fires at the first",
        ),
        (
            "Pacific/Apia",
            9,
            "2011-12-29T20:00",
            "this day does not exist: it fires on 2011-12-31 at 09:00",
        ),
        (
            "America/Nuuk",
            23,
            "2027-03-27T12:00",
            "23:00 does not exist on this day: it fires on 2027-03-28 at 00:00",
        ),
        (
            "Africa/Cairo",
            0,
            "2026-04-23T12:00",
            "00:00 does not exist on this day: it fires at 01:00",
        ),
        ("Europe/Berlin", 9, "2026-03-28T12:00", ""),
    ],
)
def test_a_fire_says_what_the_clock_does(zone: str, hour: int, after: str, note: str) -> None:
    schedule = Schedule(calendar=daily(hour), timezone=zone)
    fire = next_fire(schedule, after=milliseconds(after), anchor=0)

    assert fire is not None
    assert fire.note == note


BERLIN = "Europe/Berlin"
HOURS = {"times_of_day": ["18:00", "09:00", "09:00"]}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"rate": {"every": 15, "unit": "minute"}}, Schedule(rate=Rate(15, "minute"))),
        (
            {"rate": {"every": 366, "unit": "day"}, "timezone": "Mars", "more": 1},
            Schedule(rate=Rate(366, "day"), timezone="Mars"),
        ),
        (
            {"at": "2027-09-01T09:00", "timezone": BERLIN, "rate": None},
            Schedule(at="2027-09-01T09:00", timezone=BERLIN),
        ),
        (
            {"calendar": {**HOURS, "cadence": {"daily": {}}}, "timezone": BERLIN},
            Schedule(calendar=Calendar((9, 18)), timezone=BERLIN),
        ),
        (
            {
                "calendar": {**HOURS, "cadence": {"weekly": {"days": ["fri", "mon"]}}},
                "timezone": "UTC",
            },
            Schedule(calendar=Calendar((9, 18), weekdays=(0, 4)), timezone="UTC"),
        ),
        (
            {"calendar": {**HOURS, "cadence": {"monthly": {"days": [31, 1]}}}, "timezone": "UTC"},
            Schedule(calendar=Calendar((9, 18), month_days=(1, 31)), timezone="UTC"),
        ),
    ],
)
def test_a_schedule_is_read(document: object, expected: Schedule) -> None:
    assert parse_schedule(document) == expected


def calendar(**fields: object) -> dict[str, object]:
    whole: dict[str, object] = {"times_of_day": ["09:00"], "cadence": {"daily": {}}, **fields}
    return {"calendar": whole, "timezone": BERLIN}


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ([], "schedule:"),
        ({}, "schedule:"),
        ({"at": "2027-09-01T09:00", "rate": {"every": 1, "unit": "day"}}, "schedule:"),
        ({"at": "2027-09-01T09:00Z", "timezone": BERLIN}, "schedule.at:"),
        ({"at": "2027-09-01T09:00+02:00", "timezone": BERLIN}, "schedule.at:"),
        ({"at": "09:00", "timezone": BERLIN}, "schedule.at:"),
        ({"at": "2027-02-29T09:00", "timezone": BERLIN}, "schedule.at:"),
        ({"at": "２027-09-01T09:00", "timezone": BERLIN}, "schedule.at:"),
        ({"at": "2027-09-01T09:00"}, "schedule.timezone:"),
        ({"at": "2027-09-01T09:00", "timezone": "../etc"}, "schedule.timezone:"),
        ({"at": "2027-09-01T09:00", "timezone": "localtime"}, "schedule.timezone:"),
        ({"at": "2027-09-01T09:00", "timezone": 5}, "schedule.timezone:"),
        ({"rate": {"every": 0, "unit": "day"}}, "schedule.rate.every:"),
        ({"rate": {"every": True, "unit": "day"}}, "schedule.rate.every:"),
        ({"rate": {"every": 367, "unit": "day"}}, "schedule.rate.every:"),
        ({"rate": {"every": 1.5, "unit": "day"}}, "schedule.rate.every:"),
        ({"rate": {"every": 1, "unit": "week"}}, "schedule.rate.unit:"),
        ({"rate": {"every": 1, "unit": []}}, "schedule.rate.unit:"),
        ({"rate": 5}, "schedule.rate:"),
        (calendar(times_of_day=[]), "schedule.calendar.times_of_day:"),
        (calendar(times_of_day=["09:00", "09:30"]), "schedule.calendar.times_of_day[1]:"),
        (calendar(times_of_day=["24:00"]), "schedule.calendar.times_of_day[0]:"),
        (calendar(times_of_day=["09:00"] * 101), "schedule.calendar.times_of_day:"),
        (
            calendar(cadence={"monthly": {"days": [1] * 101}}),
            "schedule.calendar.cadence.monthly.days:",
        ),
        (calendar(cadence={}), "schedule.calendar.cadence:"),
        (
            calendar(cadence={"daily": {}, "weekly": {"days": ["mon"]}}),
            "schedule.calendar.cadence:",
        ),
        (calendar(cadence={"weekly": {}}), "schedule.calendar.cadence.weekly.days:"),
        (
            calendar(cadence={"weekly": {"days": ["Mon"]}}),
            "schedule.calendar.cadence.weekly.days[0]:",
        ),
        (calendar(cadence={"weekly": {"days": [{}]}}), "schedule.calendar.cadence.weekly.days[0]:"),
        (
            calendar(cadence={"monthly": {"days": [32]}}),
            "schedule.calendar.cadence.monthly.days[0]:",
        ),
        (
            calendar(cadence={"monthly": {"days": [True]}}),
            "schedule.calendar.cadence.monthly.days[0]:",
        ),
        (calendar(cadence={"monthly": []}), "schedule.calendar.cadence.monthly:"),
    ],
)
def test_a_schedule_that_is_none_names_the_field(document: object, place: str) -> None:
    with pytest.raises(ConveyorError) as caught:
        parse_schedule(document)

    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.detail.startswith(place)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Europe/Berlim", "; did you mean Europe/Berlin?"),
        ("europe/berlin", "; did you mean Europe/Berlin?"),
        ("Berlin", "; did you mean Europe/Berlin?"),
        ("berlim", "; did you mean Europe/Berlin?"),
        ("utc", "; did you mean UTC?"),
        ("CET ", "; did you mean CET?"),
        ("New York", "; did you mean America/New_York?"),
        ("america/new  york", "; did you mean America/New_York?"),
        ("Buenos Aires", "; did you mean America/Argentina/Buenos_Aires or America/Buenos_Aires?"),
        ("etc/gmt+1", "; did you mean Etc/GMT+1?"),
        ("GMT+1", ""),
        ("UTC+2", ""),
        ("+02:00", ""),
        ("", ""),
        ("Mars/Olympus", ""),
        (["UTC"], ""),
        (5, ""),
    ],
)
def test_the_zone_that_a_wrong_name_may_mean_is_named(name: object, hint: str) -> None:
    with pytest.raises(ConveyorError) as caught:
        parse_schedule({"at": "2027-09-01T09:00", "timezone": name})
    told = "schedule.timezone: must be the name of a zone, such as Europe/Berlin"
    assert caught.value.detail == told + hint
