"""The ports: what the rooms above need of the world, each method an intent and atomic by contract.

Every method takes the instant it acts at (`now`, milliseconds) where time matters; no type of a
vendor crosses a port. Adapters raise `ConveyorError(unavailable)` when their store cannot answer,
and what each method names; they do not log.
"""
