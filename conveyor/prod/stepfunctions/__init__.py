"""Callbacks to state machines of Step Functions."""
