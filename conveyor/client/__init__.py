"""What the command line uses to talk to a server: HTTP in, files and a terminal out."""
