"""Calls to AWS: the one interface that all adapters of the production binding use."""
