"""Talks to a server for the command line: HTTP on one side, files and a terminal on the other."""
