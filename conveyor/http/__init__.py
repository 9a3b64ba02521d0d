"""The HTTP API: parse a request, call the service, write the answer."""
