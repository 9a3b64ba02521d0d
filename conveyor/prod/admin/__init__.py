"""`conveyor admin`: the resources of a fleet and its dead letters."""
