"""The operations of the API, apart from HTTP. Knows the ports and the domain; `conveyor.http` calls
it."""

from conveyor.service.context import ServiceOptions
from conveyor.service.service import Service

__all__ = ["Service", "ServiceOptions"]
