"""The dispatch loop: lanes in order of priority, permits before receives. Knows ports, not
handlers."""
