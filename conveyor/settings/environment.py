"""Reads settings from the environment; no other module does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.settings.row import PREFIX, Setting
from conveyor.settings.table import SETTINGS, Settings

MOST = 1_000_000_000_000
"""The upper bound of every setting, whatever its unit."""
CLIENT_VARIABLE = f"{PREFIX}URL"
TOOL_VARIABLES = (f"{PREFIX}DEV_URL", f"{PREFIX}DEV_TOKEN")
"""Variables beside the client's that `conveyor-dev exec` sets for its command."""
COMPLETION_VARIABLE = f"_{PREFIX}COMPLETE"
TESTS_PREFIX = f"{PREFIX}TEST_"


class InvalidSetting(ConveyorError):
    """A setting has a value that cannot be used; the detail names it and what it takes."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(ErrorCode.INVALID_ARGUMENT, f"{variable} {problem}")


def from_environment(*, production: bool = False, **overrides: Any) -> Settings:
    """Load settings from the process environment; an override that is not None wins."""
    return load(os.environ, production=production, **overrides)


def role_named() -> str:
    """Return the value of CONVEYOR_ROLE, unchecked."""
    return os.environ.get("CONVEYOR_ROLE", "")


def completion_asked() -> str:
    """Return what a script of shell completion asks the command line for, if one does."""
    return os.environ.get(COMPLETION_VARIABLE, "")


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """List CONVEYOR_… variables that set nothing, each with the setting that is probably meant.

    They are reported, not refused: an orchestrator adds variables of this form for a service called
    conveyor.
    """
    given = os.environ if environment is None else environment
    known = {setting.variable for setting in SETTINGS}
    known |= {setting.file_variable for setting in SETTINGS if setting.secret}
    return [
        _with_suggestion(name, known)
        for name in sorted(given)
        if name.startswith(PREFIX)
        and name not in known
        and name not in (CLIENT_VARIABLE, *TOOL_VARIABLES)
        and not name.startswith(TESTS_PREFIX)
    ]


def _with_suggestion(name: str, known: set[str]) -> str:
    # Importing it above would cost every boot a few milliseconds.
    from difflib import get_close_matches

    # The common prefix would make all of them seem close.
    endings = sorted(variable.removeprefix(PREFIX) for variable in known)
    likely = get_close_matches(name.removeprefix(PREFIX), endings, n=1, cutoff=0.85)
    return f"{name} (did you mean {PREFIX}{likely[0]}?)" if likely else name


def command_environment(api: str, dev_url: str, dev_token: str) -> dict[str, str]:
    """Return this process's environment for a command that talks to a server of its own, with a key
    of its own or `local`."""
    variables = (CLIENT_VARIABLE, *TOOL_VARIABLES, "ZENROWS_BATCH_BASE_URL", "ZENROWS_API_KEY")
    values = (api, dev_url, dev_token, api, os.environ.get("ZENROWS_API_KEY") or "local")
    return {**os.environ, **dict(zip(variables, values, strict=True))}


def colour_allowed() -> bool:
    """Return whether a terminal may be coloured: not with NO_COLOR, nor if it is a dumb one."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """The command line's part of the environment: a server, and the API key for it."""

    server: str
    api_key: str

    @property
    def names_server(self) -> bool:
        """True if it names a server, by its own address or another."""
        return self.server != _USUAL_SERVER


_USUAL_SERVER = f"http://{Settings().host}:{Settings().port}/v1"


def client_environment() -> ClientEnvironment:
    """Read the server from CONVEYOR_URL, else ZENROWS_BATCH_BASE_URL, else the default address of
    conveyor-dev, and the key from ZENROWS_API_KEY, else `local`: a development server takes any
    key."""
    server = os.environ.get(CLIENT_VARIABLE) or os.environ.get("ZENROWS_BATCH_BASE_URL")
    return ClientEnvironment(
        server=server or _USUAL_SERVER,
        api_key=os.environ.get("ZENROWS_API_KEY") or "local",
    )


def load(
    environment: Mapping[str, str], /, *, production: bool = False, **overrides: Any
) -> Settings:
    """Load settings from a mapping of CONVEYOR_… variables.

    `production` selects the defaults of the production roles. Raises InvalidSetting for the first
    bad one.
    """
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        value, variable = overrides.pop(setting.name, None), setting.variable
        if value is None:
            text, variable = _read_text(setting, environment)
            if text is not None:
                value = _parse(variable, text, kinds[setting.name])
            elif production:
                value = setting.production
        if value is None:
            continue
        problem = setting.check(value) or _range_problem(value)
        if problem is not None:
            raise InvalidSetting(variable, problem)
        values[setting.name] = value
    if overrides:
        raise TypeError(f"unknown settings: {', '.join(sorted(overrides))}")
    return Settings(**values)


def _read_text(setting: Setting, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the text of a setting, from its variable or from the file that one names, and the
    variable to name in errors."""
    text, variable = environment.get(setting.variable), setting.variable
    if text is None and setting.instead in environment:
        return environment[setting.instead], setting.instead
    # An empty variable counts as not set: deployments often cannot leave one out.
    if not setting.secret or not environment.get(setting.file_variable):
        return text, variable
    if text:
        raise InvalidSetting(setting.file_variable, f"must not be set beside {variable}")
    try:
        text = Path(environment[setting.file_variable]).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise InvalidSetting(setting.file_variable, "must name a file that can be read") from None
    return text.strip(), variable


def _range_problem(value: object) -> str | None:
    """Check a number against limits beyond which clocks, files and the database fail."""
    if isinstance(value, int | float) and not -MOST <= value <= MOST:
        return f"must be a number up to {MOST:,}"
    return None


def _parse(variable: str, text: str, kind: type) -> object:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise InvalidSetting(variable, "must be true or false")
    try:
        return kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise InvalidSetting(variable, f"must be {noun}") from None
