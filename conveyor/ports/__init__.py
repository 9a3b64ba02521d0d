"""The ports: contracts between the application and its stores, queues, clock and gateways.

Each method states one intent and is atomic. A role is a Protocol for one kind of caller: a worker,
the API, or maintenance (deletions and the sweeper). A binding's adapter of jobs, runs or tasks
implements all the roles over them.

A method whose effect depends on time takes the instant of its call as `now`, in milliseconds since
the epoch. No type of a vendor crosses a port. Adapters raise ConveyorError(unavailable) if their
store cannot answer, and the errors that a method names; they do not log.
"""
