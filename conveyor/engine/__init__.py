"""The dispatch loop: lanes by the fewest messages in hand for their weight, permits before
receives. Knows ports, not handlers."""
