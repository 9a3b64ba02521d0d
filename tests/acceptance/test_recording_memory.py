"""Memory while 100,000 exchanges are recorded, and while they are replayed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.dev.recordings import open_recorder, open_recordings
from conveyor.gateway.fake import FakeGateway, expected_body
from conveyor.gateway.recording import RecordingGateway, ReplayGateway
from conveyor.ports.gateway import Gateway, ScrapeRequest

EXCHANGES = 100_000
WARM = 2_000
MOST_GROWTH = 20_000_000


def memory() -> int:
    """Bytes that this process has at most had in memory."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1_024


async def scrape(gateway: Gateway, numbers: range) -> None:
    """Scrape a page for each number, a few at a time."""

    async def part(start: int) -> None:
        for number in numbers[start::8]:
            url = f"http://shop.test/p/{number}?api_key=secret-{number}"
            async with gateway.scrape(ScrapeRequest(url, "the-key-of-all", order=number)) as got:
                assert got.content == expected_body(f"http://shop.test/p/{number % 50}")

    async with anyio.create_task_group() as group:
        for start in range(8):
            group.start_soon(part, start)


class FewPages(FakeGateway):
    """A gateway with fifty pages."""

    def scrape(self, request: ScrapeRequest):  # type: ignore[no-untyped-def]
        number = int(request.url.rpartition("-")[2]) % 50
        return super().scrape(ScrapeRequest(f"http://shop.test/p/{number}", request.api_key))


async def measured(directory: Path) -> list[int]:
    """The growth of memory, by recording and by replaying."""
    clock = SystemClock()
    grown = []
    gateway: Gateway = RecordingGateway(
        FewPages(clock, keeps_hits=False), await open_recorder(directory), clock
    )
    await scrape(gateway, range(WARM))
    before = memory()
    await scrape(gateway, range(WARM, EXCHANGES))
    await gateway.aclose()
    grown.append(memory() - before)
    before = memory()
    gateway = ReplayGateway(await open_recordings(directory))
    await scrape(gateway, range(EXCHANGES))
    await gateway.aclose()
    return [*grown, memory() - before]


def main() -> None:
    """Print the growths for a directory that does not exist yet."""
    sys.stdout.write(" ".join(map(str, anyio.run(measured, Path(sys.argv[1])))))


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.full
@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_the_number_of_exchanges(tmp_path: Path) -> None:
    program = "from tests.acceptance.test_recording_memory import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "r")],
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    recording, replaying = map(int, ran.stdout.split())
    assert recording < MOST_GROWTH
    assert replaying < MOST_GROWTH
