"""The development binding: SQLite, files and memory in one process. It promises no more than
production does."""
