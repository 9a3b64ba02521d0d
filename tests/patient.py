"""Requests to servers under test, which may take their time.

httpx itself gives up after five seconds: so long may a machine that others use leave a process
without a processor.
"""

from __future__ import annotations

import httpx

SECONDS = 60.0
"""For an answer, where a test is not about how long that takes."""


def fetched(url: str) -> httpx.Response:
    """The answer to a GET of an absolute URL on loopback, whatever it is."""
    # Loading certificates takes long, and there are none on loopback.
    return httpx.get(url, timeout=SECONDS, trust_env=False, verify=False)
