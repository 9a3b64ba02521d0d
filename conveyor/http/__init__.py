"""The HTTP API: parse, ask the service, answer. Knows the service and the words of the domain."""
