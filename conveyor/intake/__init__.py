"""The child process that checks a list of tasks and brings it into its stored form.

A long list is read here, so that the server's other requests do not stall meanwhile. `python -m
conveyor.intake` reads a `ValidationRequest` line and then the list from standard input, and writes
frames to standard output. It imports only the domain.
"""
