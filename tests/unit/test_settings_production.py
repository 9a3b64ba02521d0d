"""Settings of the production roles: their defaults, secrets in files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conveyor.bootstrap.production import _options
from conveyor.roles.production import check_place, check_role, looseness
from conveyor.settings import SETTINGS, InvalidSetting, Settings, load

SECRET = "0123456789abcdef" * 4
FLEET = {
    "CONVEYOR_ENVIRONMENT": "staging",
    "CONVEYOR_REGION": "eu-west-1",
    "CONVEYOR_BUCKET": "bodies",
    "CONVEYOR_REDIS_URL": "redis://:hunter2@cache.internal:6379/0",
    "CONVEYOR_SECRET": SECRET,
    "CONVEYOR_API_KEYS": "any",
    "CONVEYOR_PUBLIC_URL": "https://api.example.com",
}


def refusal(environment: dict[str, str], **settings: Any) -> str:
    with pytest.raises(InvalidSetting) as caught:
        check_role(load(environment, production=True, **settings))
    return caught.value.detail


@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_fleet_that_is_told_everything_may_start(role: str) -> None:
    settings = load(FLEET, production=True, role=role)

    check_role(settings)
    assert settings.table_name == "conveyor-staging"


def test_the_store_is_told_how_long_fires_are_kept() -> None:
    settings = load({**FLEET, "CONVEYOR_FIRE_RETENTION_DAYS": "7"}, production=True)

    assert _options(settings).fire_retention_days == 7


def test_the_roles_have_defaults_of_their_own() -> None:
    development, production = load({}), load({}, production=True)
    apart = {row.name for row in SETTINGS if row.production is not None}

    assert apart == {"host", "log_format", "shutdown_grace", "dashboard", "task_shard_count"}
    assert (development.task_shard_count, production.task_shard_count) == (1, 8)
    assert (development.dashboard, production.dashboard) == (True, False)
    assert (production.host, production.log_format, production.shutdown_grace) == (
        "0.0.0.0",
        "json",
        25.0,
    )
    assert development == Settings()
    assert load({"CONVEYOR_SHUTDOWN_GRACE": "3"}, production=True).shutdown_grace == 3.0


@pytest.mark.parametrize(
    ("missing", "role"),
    [
        ("CONVEYOR_ENVIRONMENT", "worker"),
        ("CONVEYOR_REGION", "worker"),
        ("CONVEYOR_BUCKET", "worker"),
        ("CONVEYOR_REDIS_URL", "worker"),
        ("CONVEYOR_SECRET", "worker"),
        ("CONVEYOR_API_KEYS", "api"),
        ("CONVEYOR_PUBLIC_URL", "api"),
    ],
)
def test_what_is_missing_is_named_in_one_line(missing: str, role: str) -> None:
    left = {name: value for name, value in FLEET.items() if name != missing}
    detail = refusal(left, role=role)

    assert detail.startswith(f"{missing} must ")
    assert "\n" not in detail


@pytest.mark.parametrize(
    ("changed", "role", "problem"),
    [
        (
            {"CONVEYOR_SECRET": "too-short"},
            "worker",
            "CONVEYOR_SECRET must have at least 32 characters",
        ),
        (
            {"CONVEYOR_SECRET": f"{SECRET},old"},
            "api",
            "CONVEYOR_SECRET must have at least 32 characters",
        ),
        ({"CONVEYOR_PUBLIC_URL": "http://api.test"}, "api", "CONVEYOR_PUBLIC_URL must be https"),
        ({"CONVEYOR_ENVIRONMENT": "Prod!"}, "api", "CONVEYOR_ENVIRONMENT must be a lower-case"),
        ({"CONVEYOR_INPUT_TTL": "172801"}, "api", "CONVEYOR_INPUT_TTL must be at most 172800"),
        ({"CONVEYOR_EXPORT_TTL": "172801"}, "worker", "CONVEYOR_EXPORT_TTL must be at most 172800"),
        ({"CONVEYOR_REDIS_URL": "http://x"}, "api", "CONVEYOR_REDIS_URL must be a redis://"),
        ({"CONVEYOR_LEDGER": "paper"}, "api", "CONVEYOR_LEDGER must be one of redis, dynamodb"),
        (
            {"CONVEYOR_RATE_LIMIT": "5", "CONVEYOR_LEDGER": "dynamodb", "CONVEYOR_REDIS_URL": ""},
            "api",
            "CONVEYOR_RATE_LIMIT must be 0",
        ),
        ({"CONVEYOR_SQS_ENDPOINT": "localhost"}, "api", "CONVEYOR_SQS_ENDPOINT must be an http"),
    ],
)
def test_what_is_unsafe_is_refused(changed: dict[str, str], role: str, problem: str) -> None:
    assert refusal({**FLEET, **changed}, role=role).startswith(problem)


def test_a_role_has_to_be_named_and_known() -> None:
    assert refusal(FLEET) == "CONVEYOR_ROLE must be one of api, worker"
    assert refusal(FLEET, role="both") == "CONVEYOR_ROLE must be one of api, worker"


def test_no_redis_is_needed_where_dynamodb_keeps_the_permits() -> None:
    without = {name: value for name, value in FLEET.items() if name != "CONVEYOR_REDIS_URL"}

    check_place(load({**without, "CONVEYOR_LEDGER": "dynamodb"}, production=True))


def test_an_api_on_loopback_needs_no_public_url() -> None:
    local = {name: value for name, value in FLEET.items() if name != "CONVEYOR_PUBLIC_URL"}

    check_role(load(local, production=True, role="api", host="127.0.0.1"))
    check_role(
        load({**FLEET, "CONVEYOR_PUBLIC_URL": "http://localhost:9000"}, production=True, role="api")
    )


def test_the_region_of_the_surroundings_counts_where_none_is_set() -> None:
    assert load({"AWS_REGION": "eu-north-1"}).region == "eu-north-1"
    both = {"AWS_REGION": "eu-north-1", "CONVEYOR_REGION": "us-east-2"}
    assert load(both).region == "us-east-2"


def test_rules_that_are_loose_are_told() -> None:
    strict = load({**FLEET, "CONVEYOR_API_KEYS": "/keys"}, production=True, role="api")
    loose = load(
        {**FLEET, "CONVEYOR_ALLOW_PRIVATE": "1", "CONVEYOR_GATEWAY": "fake"},
        production=True,
        role="api",
    )

    assert looseness(strict) == []
    assert len(looseness(loose)) == 3


@pytest.mark.parametrize(
    ("role", "gateway", "told"),
    [
        ("worker", "direct", ["CONVEYOR_GATEWAY"]),
        ("worker", "https://api.example.com/v1/", []),
        ("api", "direct", []),
    ],
)
def test_a_worker_that_fetches_pages_itself_is_told(
    role: str, gateway: str, told: list[str]
) -> None:
    given = {**FLEET, "CONVEYOR_API_KEYS": "/keys", "CONVEYOR_GATEWAY": gateway}
    lines = looseness(load(given, production=True, role=role))

    assert [word for line in lines for word in line.split() if word.startswith("CONVEYOR")] == told


@pytest.mark.parametrize(
    ("changed", "collide"),
    [
        ({"CONVEYOR_PORT": "9001"}, True),
        ({"CONVEYOR_PORT": "9001", "CONVEYOR_HOST": "127.0.0.1"}, True),
        (
            {
                "CONVEYOR_PORT": "9001",
                "CONVEYOR_HOST": "10.0.0.1",
                "CONVEYOR_METRICS_HOST": "10.0.0.2",
            },
            False,
        ),
        ({"CONVEYOR_PORT": "0", "CONVEYOR_METRICS_PORT": "0"}, False),
    ],
)
def test_the_two_ports_of_an_api_are_two(changed: dict[str, str], collide: bool) -> None:
    settings = load({**FLEET, "CONVEYOR_API_KEYS": "/keys", **changed}, production=True, role="api")
    refused = ""
    try:
        check_role(settings)
    except InvalidSetting as error:
        refused = error.detail

    assert refused.startswith("CONVEYOR_METRICS_PORT must differ from CONVEYOR_PORT") is collide


# -- secrets --


def test_a_secret_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")

    assert load({"CONVEYOR_SECRET_FILE": str(file)}).secret == SECRET
    file.write_text("redis://:hunter2@cache:6379/1")
    assert load({"CONVEYOR_REDIS_URL_FILE": str(file)}).redis_url.endswith("/1")


def test_only_secrets_lie_in_files(tmp_path: Path) -> None:
    secrets = {row.name for row in SETTINGS if row.secret}
    file = tmp_path / "port"
    file.write_text("1234")

    assert secrets == {"secret", "redis_url", "gateway_proxy"}
    assert load({"CONVEYOR_PORT_FILE": str(file)}).port == Settings().port


def test_a_secret_is_given_once(tmp_path: Path) -> None:
    given = {"CONVEYOR_SECRET": SECRET, "CONVEYOR_SECRET_FILE": str(tmp_path / "secret")}

    with pytest.raises(InvalidSetting) as caught:
        load(given)
    assert caught.value.detail == "CONVEYOR_SECRET_FILE must not be set beside CONVEYOR_SECRET"


def test_an_empty_variable_is_one_that_is_not_set(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)

    assert load({"CONVEYOR_SECRET": "", "CONVEYOR_SECRET_FILE": str(file)}).secret == SECRET
    assert load({"CONVEYOR_SECRET": SECRET, "CONVEYOR_SECRET_FILE": ""}).secret == SECRET
    assert load({"CONVEYOR_SECRET": "", "CONVEYOR_SECRET_FILE": ""}).secret == ""


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(InvalidSetting) as caught:
        load({"CONVEYOR_SECRET_FILE": str(file)})
    assert caught.value.detail == "CONVEYOR_SECRET_FILE must name a file that can be read"


def test_settings_show_no_secret() -> None:
    shown = repr(load(FLEET, production=True))

    assert SECRET not in shown
    assert "hunter2" not in shown
    assert "staging" in shown


def test_a_refused_address_of_redis_is_not_repeated() -> None:
    detail = refusal({**FLEET, "CONVEYOR_REDIS_URL": "rediz://:hunter2@cache"}, role="api")

    assert "hunter2" not in detail


@pytest.mark.parametrize("bucket", ["Bad_Name", "ab", "-abc", "a" * 64, "ümlaut"])
def test_a_name_that_aws_would_refuse_is_told_with_its_variable(bucket: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^invalid_argument: CONVEYOR_BUCKET must be 3 to 63"):
        check_place(load({**FLEET, "CONVEYOR_BUCKET": bucket}, production=True))
    with pytest.raises(InvalidSetting, match=r"CONVEYOR_TABLE must be 3 to 255"):
        check_place(load({**FLEET, "CONVEYOR_TABLE": "no table"}, production=True))
