"""The programs: each puts bootstrap's parts to work until it is told to stop."""
