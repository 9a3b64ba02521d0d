"""Logic on top of the ports, for service and handlers alike."""
