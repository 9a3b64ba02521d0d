"""The commands of production: each names its missing settings, in one line, before it does
anything."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from conveyor import cli
from conveyor.cli import conveyor as program
from conveyor.domain.api_keys import key_hash
from conveyor.settings import PREFIX

FLEET = {
    "CONVEYOR_ENVIRONMENT": "staging",
    "CONVEYOR_REGION": "eu-west-1",
    "CONVEYOR_BUCKET": "bodies",
    "CONVEYOR_LEDGER": "dynamodb",
    "CONVEYOR_SECRET": "0123456789abcdef" * 4,
    "CONVEYOR_API_KEYS": "any",
}


HASH = key_hash("a key")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is set but what a test sets."""
    for name in [name for name in os.environ if name.startswith((PREFIX, "AWS_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, shown.out, shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["api"],
        ["worker"],
        ["admin", "init"],
        ["admin", "check"],
        ["admin", "destroy", "--yes", "staging"],
        ["admin", "ledger", "redis"],
        ["admin", "rebind"],
        ["admin", "run", "01K"],
        ["admin", "pause", "--fleet"],
        ["admin", "resume", "--fleet"],
        ["admin", "dlq", "list"],
        ["admin", "dlq", "redrive", "--all"],
        ["admin", "dlq", "drop", "abc"],
        ["admin", "schedules", "list"],
        ["admin", "schedules", "pause", "--key-hash", HASH],
        ["admin", "schedules", "resume", "--key-hash", HASH],
    ],
)
def test_without_a_fleet_nothing_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (1, "")
    assert err.startswith("conveyor: CONVEYOR_ENVIRONMENT must name the fleet")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["api", "--port", "x"],
        ["worker", "--workers", "0"],
        ["worker", "--port", "1"],
        ["admin", "destroy"],
        ["admin", "ledger", "paper"],
        ["admin", "run"],
        ["admin", "pause"],
        ["admin", "resume"],
        ["admin", "dlq", "redrive"],
        ["admin", "dlq", "drop", "abc", "--all"],
        ["admin", "schedules", "pause"],
        ["admin", "schedules", "resume", "--key-hash", "hunter2"],
        ["admin", "nope"],
    ],
)
def test_a_bad_flag_is_a_mistake_of_use(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (2, "")
    assert err.count("\n") == 1


ADMINISTRATION = [
    ["admin", "init"],
    ["admin", "check"],
    ["admin", "destroy", "--yes", "staging"],
    ["admin", "ledger", "redis"],
    ["admin", "rebind"],
    ["admin", "run", "01K"],
    ["admin", "pause", "--fleet"],
    ["admin", "dlq", "list"],
    ["admin", "dlq", "redrive", "--all"],
    ["admin", "dlq", "drop", "abc"],
    ["admin", "schedules", "list"],
    ["admin", "schedules", "pause", "--key-hash", HASH],
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ADMINISTRATION, ids=" ".join)
@pytest.mark.parametrize(
    ("surroundings", "told"),
    [
        ({"AWS_PROFILE": "nope"}, "The config profile (nope) could not be found"),
        ({"AWS_CONFIG_FILE": sys.executable}, f"Unable to parse config file: {sys.executable}"),
        ({"AWS_ACCESS_KEY_ID": "half"}, "Partial credentials found in env, missing: AWS_SECRET"),
    ],
)
def test_what_makes_no_client_of_aws_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
    environment: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    surroundings: dict[str, str],
    told: str,
) -> None:
    nothing = {"AWS_CONFIG_FILE": str(tmp_path / "none"), "CONVEYOR_METRICS_HOST": "127.0.0.1"}
    for name, value in {**FLEET, **nothing, **surroundings}.items():
        environment.setenv(name, value)
    environment.setenv("CONVEYOR_LOG_LEVEL", "error")
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (1, "")
    assert err.startswith(f"conveyor: the AWS configuration is not usable: {told}")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_what_a_program_for_credentials_prints_is_not_told(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\ncredential_process = sh -c 'echo hunter2 >&2; exit 1'\n")
    for name, value in {**FLEET, "AWS_CONFIG_FILE": str(config)}.items():
        environment.setenv(name, value)
    environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    code, out, err = run(capsys, "admin", "check")

    assert (code, out) == (1, "")
    assert err == "conveyor: the AWS configuration is not usable: CredentialRetrievalError\n"


@pytest.mark.parametrize("arguments", [["worker"], *ADMINISTRATION], ids=" ".join)
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CONVEYOR_REGION", "us east"),
        ("CONVEYOR_REGION", "us-east-1\n"),
        ("CONVEYOR_S3_ENDPOINT", "http://a..b"),
        ("CONVEYOR_REDIS_URL", "redis://127.0.0.1/0?hunter2=bar"),
        ("CONVEYOR_REDIS_URL", "redis://hunter2/x@127.0.0.1/0"),
        ("CONVEYOR_GATEWAY", "http://hunter2:hunter2@a..b"),
    ],
)
def test_an_address_that_cannot_be_one_is_told_by_its_variable_alone(
    capsys: pytest.CaptureFixture[str],
    environment: pytest.MonkeyPatch,
    arguments: list[str],
    variable: str,
    text: str,
) -> None:
    for name, value in {**FLEET, variable: text}.items():
        environment.setenv(name, value)
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (1, "")
    assert err.startswith(f"conveyor: {variable} must ")
    assert err.count("\n") == 1
    assert "hunter2" not in err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("QueueUrl"), "KeyError: 'QueueUrl'"),
        (ExceptionGroup("two", [ValueError("no"), AssertionError()]), "ValueError: no"),
        (BrokenPipeError(), ""),
        (PermissionError(13, "Permission denied"), "Permission denied"),
    ],
)
def test_no_command_of_an_administrator_ends_in_a_traceback(
    capsys: pytest.CaptureFixture[str],
    environment: pytest.MonkeyPatch,
    error: Exception,
    told: str,
) -> None:
    async def broken(*_: object, **_flags: object) -> int:
        raise error

    for name, value in FLEET.items():
        environment.setenv(name, value)
    environment.setattr("conveyor.roles.admin.check", broken)

    assert run(capsys, "admin", "check") == (1, "", f"conveyor: {told}\n" if told else "")


@pytest.mark.parametrize("role", ["api", "worker"])
def test_without_a_command_the_role_of_the_environment_starts(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch, role: str
) -> None:
    for name, value in FLEET.items():
        environment.setenv(name, value)
    environment.setenv("CONVEYOR_ROLE", role)
    environment.setenv("CONVEYOR_SECRET", "short")
    code, _, err = run(capsys)

    assert code == 1
    assert err.startswith("conveyor: CONVEYOR_SECRET must have at least 32 characters")


def test_an_unknown_role_is_told(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("CONVEYOR_ROLE", "both")

    assert run(capsys) == (1, "", "conveyor: CONVEYOR_ROLE must be one of api, worker\n")


def test_without_a_role_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)

    assert (code, err) == (0, "")
    assert "Usage: conveyor" in out


def test_destroying_wants_the_name_once_more(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch
) -> None:
    for name, value in FLEET.items():
        environment.setenv(name, value)
    code, out, err = run(capsys, "admin", "destroy", "--yes", "production")

    assert (code, out) == (1, "")
    assert err == "conveyor: --yes names production, CONVEYOR_ENVIRONMENT staging\n"


def ended(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A role as a process of its own, which it takes over as soon as it opens."""
    here = {"CONVEYOR_METRICS_HOST": "127.0.0.1", "CONVEYOR_LOG_LEVEL": "error"}
    return subprocess.run(
        [sys.executable, "-m", "conveyor", *arguments, "--metrics-port", "0"],
        env={**os.environ, **FLEET, **here, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_file_of_keys_that_is_missing_stops_an_api(tmp_path: Path) -> None:
    changed = {"CONVEYOR_API_KEYS": str(tmp_path / "none")}
    api = ended("api", "--host", "127.0.0.1", "--port", "0", environment=changed)

    assert (api.returncode, api.stdout) == (1, "")
    assert api.stderr == (
        "conveyor: CONVEYOR_API_KEYS must be any, hashes of keys, or a readable file of them\n"
    )


@pytest.mark.slow
def test_a_gateway_that_is_refused_when_it_opens_is_told_by_its_flag(tmp_path: Path) -> None:
    given = ["--data-dir", str(tmp_path), "--port", "0", "--gateway", "http://xn--a/"]
    program = "from conveyor.cli import dev_main; dev_main()"
    server = subprocess.run(
        [sys.executable, "-c", program, *given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert server.returncode == 2
    assert server.stderr.endswith(": --gateway must be a URL that can be called\n")
    assert server.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_makes_no_client_of_aws_stops_a_worker_in_the_same_line() -> None:
    worker = ended("worker", environment={"AWS_PROFILE": "nope"})

    assert (worker.returncode, worker.stdout) == (1, "")
    assert worker.stderr == (
        "conveyor: the AWS configuration is not usable:"
        " The config profile (nope) could not be found\n"
    )


def test_a_hash_is_made_of_a_key_that_is_read(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch
) -> None:
    environment.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"key-of-alice\n")))

    assert run(capsys, "admin", "key-hash") == (0, f"{key_hash('key-of-alice')}\n", "")
    environment.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"key-of-alice\n")))
    as_json = f'{{"key_hash": "{key_hash("key-of-alice")}"}}\n'
    assert run(capsys, "admin", "key-hash", "--json") == (0, as_json, "")
    environment.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" one\r\n\ntwo \n")))
    lines = f"{key_hash('one')}\n{key_hash('two')}\n"
    assert run(capsys, "admin", "key-hash") == (0, lines, "")
    environment.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert run(capsys, "admin", "key-hash")[0] == 2


@pytest.mark.parametrize("line", ["schlüssel", "two words", "k" * 513, "a\x07b"])
def test_no_hash_is_made_where_one_is_a_key_that_no_request_carries(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch, line: str
) -> None:
    given = io.BytesIO(f"key-of-alice\n{line}\n".encode())
    environment.setattr("sys.stdin", io.TextIOWrapper(given))
    code, out, err = run(capsys, "admin", "key-hash")

    assert (code, out) == (1, "")
    assert err.startswith("conveyor: line 2 is not an API key")
    assert line not in err


GROUPS = {
    (),
    ("admin",),
    ("admin", "dlq"),
    ("admin", "schedules"),
    ("keys",),
    ("webhook",),
    ("schedule",),
    ("dev", "data"),
}


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_a_group_without_a_command_shows_its_help_as_it_is(
    capsys: pytest.CaptureFixture[str], group: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *group)

    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['conveyor', *group])} ")
    assert "\nCommands:\n" in out


def test_every_group_is_among_these() -> None:
    def groups(command: click.Command, name: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(command, click.Group):
            yield name
            for part, inner in command.commands.items():
                yield from groups(inner, (*name, part))

    # Without a command, conveyor-dev is a server.
    assert set(groups(cli.conveyor, ())) == {*GROUPS, ("dev",)}


WITHOUT_JSON = {
    "completion",  # prints a script for a shell
    "dev exec",  # what it prints is its command's
}


def test_every_command_speaks_json() -> None:
    def leaves(command: click.Command, *words: str) -> Iterator[tuple[str, click.Command]]:
        if not isinstance(command, click.Group):
            yield " ".join(words), command
            return
        for name, one in command.commands.items():
            yield from leaves(one, *words, name)

    silent = {
        name
        for name, command in leaves(program)
        if not {"--json", "--jsonl"} & {option for one in command.params for option in one.opts}
    }
    assert silent == WITHOUT_JSON
