"""The demonstration: a small site and a job over all of it."""
