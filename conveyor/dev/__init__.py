"""The development binding: SQLite, files and memory in one process. As weak as production."""
