"""The child process that checks a list of tasks and brings it into its stored form.

A long list is read here rather than in the server, whose other requests would stand still
meanwhile. `python -m conveyor.intake` reads a `ValidationRequest` line and then the list from its
standard input, and writes frames to its standard output; it knows the domain and nothing else.
"""
