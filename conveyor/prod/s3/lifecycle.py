"""How long S3 keeps what lies below each prefix: the last broom, behind the sweeper's.

The sweeper removes bodies when their time has come. These rules remove what it missed, so each
leaves a margin: S3 counts whole days, and begins them at midnight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conveyor.ports.blobs import LIFECYCLE_DAYS, PASSING_DAYS

MARGIN_DAYS = 2
"""Days that a body may outlive its class."""
STAGED_DAYS = 7
UPLOAD_DAYS = 1
"""Days after which the parts of an upload that was never finished go."""

Rule = dict[str, Any]


def lifecycle_rules() -> list[Rule]:
    """The rules, in the shape of PutBucketLifecycleConfiguration; each by its `ID`."""
    expiring = {
        **{f"results-{days}": (f"results/{days}/", days + MARGIN_DAYS) for days in LIFECYCLE_DAYS},
        "staged": ("staged/", STAGED_DAYS),
        "inputs": ("inputs/", PASSING_DAYS),
        "exports": ("exports/", PASSING_DAYS),
    }
    rules: list[Rule] = [
        {
            "ID": name,
            "Status": "Enabled",
            "Filter": {"Prefix": prefix},
            "Expiration": {"Days": days},
        }
        for name, (prefix, days) in expiring.items()
    ]
    rules.append(
        {
            "ID": "unfinished-uploads",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": UPLOAD_DAYS},
        }
    )
    return rules


def with_ours(rules: Sequence[Mapping[str, Any]]) -> list[Rule]:
    """Ours, and those of the rules that are somebody else's."""
    ours = {rule["ID"] for rule in lifecycle_rules()}
    return [
        *(dict(rule) for rule in rules if rule.get("ID") not in ours),
        *lifecycle_rules(),
    ]


def differences(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a bucket's rules lack of ours, or say otherwise; somebody else's are not looked at."""
    found = {rule.get("ID"): _stated(rule) for rule in rules}
    told = []
    for rule in lifecycle_rules():
        name, wanted = rule["ID"], _stated(rule)
        if name not in found:
            told.append(f"lacks the lifecycle rule {name}")
        elif found[name] != wanted:
            told.append(f"its lifecycle rule {name} is {found[name]}, not {wanted}")
    return told


def _stated(rule: Mapping[str, Any]) -> str:
    """A rule in words: what of it counts."""
    prefix = rule.get("Filter", {}).get("Prefix", rule.get("Prefix", ""))
    days = rule.get("Expiration", {}).get("Days")
    unfinished = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
    parts = [
        "on" if rule.get("Status") == "Enabled" else "off",
        f"below {prefix}" if prefix else "everywhere",
    ]
    if days is not None:
        parts.append(f"after {days} days")
    if unfinished is not None:
        parts.append(f"uploads after {unfinished} days")
    return " ".join(parts)
