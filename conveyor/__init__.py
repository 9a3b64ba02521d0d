"""Conveyor: an asynchronous batch-scraping service."""

__version__ = "0.1.0"
