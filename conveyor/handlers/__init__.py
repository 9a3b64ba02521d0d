"""The work that messages mean, one kind a file. Knows ports, not the dispatch loop."""
