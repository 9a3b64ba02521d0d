"""The names of the permit policies, and the words of the published comparison for two of them."""

from __future__ import annotations

POLICIES = ("reserve", "reserve-strict", "local-exact", "local", "off")
WORDS = {"gate on": "reserve", "gate off": "off"}
"""With the gate on a worker takes a permit before it receives a message; with it off, after."""
LEGEND = '"gate on" is reserve, "gate off" is off.'
"""What stands below a table."""


def policy_of(text: str) -> str | None:
    """The policy that a word means: its name, or gate on, gate-on, GATE OFF …; None for others."""
    word = " ".join(text.lower().replace("-", " ").split())
    names = {policy.replace("-", " "): policy for policy in POLICIES}
    return {**names, **WORDS}.get(word)
