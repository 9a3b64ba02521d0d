"""The ports: contracts alone, each method an intent and atomic, cut into roles by who calls them.

A role is a Protocol for one kind of caller: a worker, the API, or maintenance (deletions and the
sweeper). A binding's adapter of jobs, runs or tasks implements all the roles over them.

Every method takes the instant it acts at (`now`, milliseconds) where time matters; no type of a
vendor crosses a port. Adapters raise `ConveyorError(unavailable)` when their store cannot answer,
and the errors that a method names; they do not log.
"""
