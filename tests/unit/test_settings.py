"""Settings: one table, read from a mapping that is passed in."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from conveyor import settings
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.settings import SETTINGS, InvalidSetting, Settings, load, unknown_variables
from tests.unit.spec_document import differences


def refusal(environment: dict[str, str], **overrides: Any) -> str:
    with pytest.raises(InvalidSetting) as caught:
        load(environment, **overrides)
    assert isinstance(caught.value, ConveyorError)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return caught.value.detail


def test_an_empty_environment_gives_the_defaults() -> None:
    assert load({}) == Settings()
    assert load({"PATH": "/bin", "CONVEYOR": "x"}) == Settings()


def test_the_table_and_the_fields_are_the_same() -> None:
    rows = [row.name for row in SETTINGS]
    names = [field.name for field in fields(Settings)]

    assert not differences("the rows of conveyor/settings", rows, names)
    for row, name in zip(rows, names, strict=True):
        assert row == name, f"conveyor/settings: {row} and {name} change places in the rows"


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_every_row_explains_itself_and_allows_its_default(row: settings.Setting) -> None:
    assert row.variable == f"CONVEYOR_{row.name.upper()}"
    assert row.unit
    assert row.help
    assert row.help == row.help.strip()
    assert row.check(getattr(Settings(), row.name)) is None


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_every_default_survives_the_environment(row: settings.Setting) -> None:
    default = getattr(Settings(), row.name)
    assert load({row.variable: str(default)}) == Settings()
    assert type(getattr(load({row.variable: str(default)}), row.name)) is type(default)


def test_the_environment_is_read_by_type() -> None:
    loaded = load(
        {"CONVEYOR_PORT": "0", "CONVEYOR_RETRY_BASE": "0.25", "CONVEYOR_DATA_DIR": "/x y"}
    )
    assert (loaded.port, loaded.retry_base, loaded.data_dir) == (0, 0.25, "/x y")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", True),
        (" YES ", True),
        ("1", True),
        ("on", True),
        ("false", False),
        ("0", False),
        ("No", False),
        ("off", False),
        ("", False),
    ],
)
def test_switches(text: str, expected: bool) -> None:
    assert load({"CONVEYOR_ALLOW_PRIVATE": text}).allow_private is expected


def test_an_override_wins_and_none_does_not() -> None:
    environment = {"CONVEYOR_PORT": "1234"}
    assert load(environment, port=0).port == 0
    assert load(environment, port=None).port == 1234
    assert load({"CONVEYOR_PORT": "broken"}, port=5).port == 5
    assert load({"CONVEYOR_ALLOW_PRIVATE": "true"}, allow_private=False).allow_private is False


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("PORT", "x", "a whole number"),
        ("PORT", "80.5", "a whole number"),
        ("PORT", "65536", "from 0 to 65535"),
        ("PORT", "-1", "from 0 to 65535"),
        ("WORKERS", "0", "from 1 to 10000"),
        ("RETRY_BASE", "soon", "a number"),
        ("RETRY_BASE", "-0.1", "at least 0"),
        ("RETRY_BASE", "nan", "at least 0"),
        ("HEARTBEAT", "0", "at least 0.1"),
        ("ALLOW_PRIVATE", "maybe", "true or false"),
        ("LOG_LEVEL", "loud", "one of debug, info, warning, error"),
        ("LOG_FORMAT", "xml", "one of text, json"),
        ("GATEWAY", "ftp://a", "http(s) URL"),
        ("GATEWAY", "", "http(s) URL"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(
    variable: str, text: str, problem: str
) -> None:
    detail = refusal({f"CONVEYOR_{variable}": text})
    assert detail.startswith(f"CONVEYOR_{variable} must be ")
    assert problem in detail


DURATIONS = [row for row in SETTINGS if row.unit in ("seconds", "days")]


@pytest.mark.parametrize("row", DURATIONS, ids=lambda row: row.name)
def test_no_duration_is_absurd(row: settings.Setting) -> None:
    """A wait for ever leaves work lying, and times beyond all calendars cannot be written."""
    days = row.name.endswith("_days")
    longest = 36_500 if days else 31_536_000
    assert f"{row.variable} must be at most " in refusal({row.variable: str(longest + 1)})
    most = int(refusal({row.variable: "999999999999"}).rpartition(" ")[2])
    assert getattr(load({row.variable: str(most)}), row.name) == most <= longest
    now, last_day = 1_800_000_000, 253_402_300_799
    assert now + most * (86_400 if days else 1) < last_day


@pytest.mark.parametrize(
    ("variable", "most"),
    [
        ("PERMIT_LEASE", 3_600),
        ("VISIBILITY_TIMEOUT", 43_200),
        ("DISCOVERY_INTERVAL", 3_600),
        ("RESULT_URL_TTL", 604_800),
    ],
)
def test_what_others_wait_for_is_bounded(variable: str, most: int) -> None:
    assert refusal({f"CONVEYOR_{variable}": f"{most + 1}"}).endswith(f"must be at most {most}")
    assert refusal({f"CONVEYOR_{variable}": "1e11"}).endswith(f"must be at most {most}")
    load({f"CONVEYOR_{variable}": str(most)})


def test_a_bad_override_is_refused_too() -> None:
    assert refusal({}, workers=0).startswith("CONVEYOR_WORKERS must be ")


def test_a_refusal_never_repeats_the_secret() -> None:
    environment = {"CONVEYOR_SECRET": "very-secret", "CONVEYOR_PORT": "very-secret"}
    assert "very-secret" not in refusal(environment)


@pytest.mark.parametrize("gateway", ["direct", "fake", "http://127.0.0.1:1/", "https://api.a/v1/"])
def test_gateways(gateway: str) -> None:
    assert load({"CONVEYOR_GATEWAY": gateway}).gateway == gateway


def test_an_unknown_override_is_a_mistake_of_the_programmer() -> None:
    with pytest.raises(TypeError, match="colour"):
        load({}, colour="red")


def test_the_process_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CONVEYOR_PORT", "4321")
    loaded = settings.from_environment(workers=3)
    assert (loaded.port, loaded.workers) == (4321, 3)


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("environment", "server", "api_key"),
    [
        ({}, "http://127.0.0.1:9000/v1", "local"),
        ({"ZENROWS_BATCH_BASE_URL": "http://b/v1"}, "http://b/v1", "local"),
        (
            {"CONVEYOR_URL": "http://a/v1", "ZENROWS_BATCH_BASE_URL": "http://b/v1"},
            "http://a/v1",
            "local",
        ),
        ({"CONVEYOR_URL": "", "ZENROWS_API_KEY": "key"}, "http://127.0.0.1:9000/v1", "key"),
    ],
)
def test_where_the_command_line_finds_its_server(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], server: str, api_key: str
) -> None:
    for name in ("CONVEYOR_URL", "ZENROWS_BATCH_BASE_URL", "ZENROWS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = settings.client_environment()
    assert (found.server, found.api_key) == (server, api_key)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CONVEYOR_QUEUE_WINDOW", "99999999999999999999"),
        ("CONVEYOR_VISIBILITY_TIMEOUT", "inf"),
        ("CONVEYOR_VISIBILITY_TIMEOUT", "nan"),
        ("CONVEYOR_IDEMPOTENCY_TTL", "1e300"),
        ("CONVEYOR_RETRY_CAP", "1e300"),
        ("CONVEYOR_GATEWAY", "http://"),
        ("CONVEYOR_GATEWAY", "http://host:port/"),
        ("CONVEYOR_PUBLIC_URL", "not a url"),
        ("CONVEYOR_DATA_DIR", ""),
    ],
)
def test_what_would_break_the_server_later_is_refused_by_name(variable: str, text: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^invalid_argument: {variable} must be "):
        load({variable: text})


def test_variables_that_set_nothing_are_named_with_what_is_probably_meant() -> None:
    given = {
        "CONVEYOR_PERMIT_LAESE": "60",
        "CONVEYOR_SERVICE_HOST": "10.0.0.1",
        "CONVEYORS": "x",
        "PORT": "1",
    }
    assert unknown_variables(given) == [
        "CONVEYOR_PERMIT_LAESE (did you mean CONVEYOR_PERMIT_LEASE?)",
        "CONVEYOR_SERVICE_HOST",
    ]


def test_no_variable_that_means_something_is_told_as_unknown() -> None:
    given = [row.variable for row in SETTINGS]
    given += [row.file_variable for row in SETTINGS if row.secret]
    given += ["CONVEYOR_URL", "CONVEYOR_TEST_AWS"]
    assert unknown_variables(dict.fromkeys(given, "x")) == []


def test_a_file_is_known_for_secrets_alone() -> None:
    assert unknown_variables({"CONVEYOR_PORT_FILE": "x"}) == ["CONVEYOR_PORT_FILE"]
