"""The settings: their table, their checks, and reading them from the environment."""

from __future__ import annotations

from conveyor.settings.environment import (
    InvalidSetting,
    client_environment,
    from_environment,
    load,
    role_named,
    unknown_variables,
)
from conveyor.settings.table import PREFIX, ROLES, SETTINGS, Setting, Settings

__all__ = [
    "PREFIX",
    "ROLES",
    "SETTINGS",
    "InvalidSetting",
    "Setting",
    "Settings",
    "client_environment",
    "from_environment",
    "load",
    "role_named",
    "unknown_variables",
]
