"""Adapters on Redis, which may lose its data at any time: permits, rate limits, cached jobs."""
