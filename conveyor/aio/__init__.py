"""Concurrency and resilience on top of anyio, for every room above the ports."""
