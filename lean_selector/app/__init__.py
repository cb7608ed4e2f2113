"""The service processes: flags, creation of all objects, start and shutdown, saved state."""
