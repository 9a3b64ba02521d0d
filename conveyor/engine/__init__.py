"""The loop: lanes in priority order, permits before receive. Knows ports, not handlers."""
