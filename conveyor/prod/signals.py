"""The signals port where api and workers are apart: there are none."""

from __future__ import annotations

import anyio


class NoSignals:
    """Hints go nowhere, and nobody is ever woken: discovery over the records finds every run."""

    def run_changed(self, run_id: str) -> None:
        """Pass over a hint."""

    async def wait(self) -> set[str]:
        """Wait until cancelled."""
        await anyio.sleep_forever()
        return set()
