"""The resources of a fleet: made, checked, removed; and its dead letters."""
