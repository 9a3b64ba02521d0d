"""The settings: their table, their checks, and reading them from the environment."""

from __future__ import annotations

from conveyor.settings.environment import (
    COMPLETION_VARIABLE,
    InvalidSetting,
    client_environment,
    colour_allowed,
    command_environment,
    completion_asked,
    from_environment,
    load,
    role_named,
    unknown_variables,
)
from conveyor.settings.row import PREFIX, ROLES, Setting
from conveyor.settings.table import SETTINGS, Settings

__all__ = [
    "COMPLETION_VARIABLE",
    "PREFIX",
    "ROLES",
    "SETTINGS",
    "InvalidSetting",
    "Setting",
    "Settings",
    "client_environment",
    "colour_allowed",
    "command_environment",
    "completion_asked",
    "from_environment",
    "load",
    "role_named",
    "unknown_variables",
]
