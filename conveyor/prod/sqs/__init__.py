"""Queues on SQS."""
