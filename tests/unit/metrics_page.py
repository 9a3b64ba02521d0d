"""Metrics as a page of /metrics shows them, and as the table of telemetry describes them."""

from __future__ import annotations

import re

from conveyor.engine.telemetry import COUNTER, METRICS


def served_metrics(page: str) -> dict[str, tuple[str, str]]:
    """The type and the help of each metric on a page."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", page, re.MULTILINE))
    return {name: (kind, helps[name]) for name, kind in types.items()}


def described_metrics(program: str) -> dict[str, tuple[str, str]]:
    """The type and the help of each metric that a program has to serve."""
    return {
        f"conveyor_{name}{'_total' if one.kind == COUNTER else ''}": (one.kind, one.help)
        for name, one in METRICS.items()
        if program in one.served_by.split(", ")
    }
