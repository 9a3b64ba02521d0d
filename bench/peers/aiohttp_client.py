"""Bare aiohttp, for `scripts/bench gateway_engine`: set up as a scraper would for speed."""

from __future__ import annotations

import aiohttp
from yarl import URL

from bench.gets import CONCURRENCY, HEADERS, TIMEOUT, Times, main, timed


async def through_aiohttp(url: str, count: int) -> Times:
    """Time GETs through one session, without cookies, decoding or redirects."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONCURRENCY),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT),
        headers=HEADERS,
        auto_decompress=False,
    )

    async def fetch(address: str) -> int:
        async with session.get(URL(address, encoded=True), allow_redirects=False) as response:
            return len(await response.read())

    async with session:
        return await timed(fetch, url, count)


if __name__ == "__main__":
    main({"aiohttp": through_aiohttp})
