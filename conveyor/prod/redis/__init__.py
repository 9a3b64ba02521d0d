"""What Redis holds: permits, request rates and a cache of templates. It may be lost at any time."""
