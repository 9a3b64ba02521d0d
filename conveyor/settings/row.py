"""The row of one setting: its variable, its unit, its meaning and the programs that use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conveyor.settings.validators import Check

PREFIX = "CONVEYOR_"
ROLES = ("api", "worker")

# The programs that use a setting. `conveyor run` is conveyor-dev in one process.
EVERY_SERVER = "conveyor-dev, conveyor api, conveyor worker"
SERVERS = "conveyor-dev, conveyor api"
WORKERS = "conveyor-dev, conveyor worker"
DEVELOPMENT = "conveyor-dev"
PRODUCTION = "conveyor api, conveyor worker"
FLEET = "conveyor api, conveyor worker, conveyor admin"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: the field, its unit, its meaning, its values.

    `help` continues after the unit: "seconds", "between looks for changed runs". `used_by` lists
    the programs that use the setting. `production` is the default of the production roles, if it
    differs. A `secret` may also be given as a file, and is shown nowhere. `instead` names another
    product's variable that applies where this one is not set.
    """

    name: str
    unit: str
    help: str
    check: Check = lambda _value: None
    used_by: str = EVERY_SERVER
    production: Any = None
    secret: bool = False
    instead: str = ""

    @property
    def variable(self) -> str:
        """Return the environment variable that sets it."""
        return PREFIX + self.name.upper()

    @property
    def file_variable(self) -> str:
        """Return the variable that names a file holding it; for secrets only."""
        return f"{self.variable}_FILE"
