"""The same job written for other task queues; run by their own environment, .venv-peers."""
