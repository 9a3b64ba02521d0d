"""Concurrency and resilience on top of anyio: what every room above the ports may use."""
