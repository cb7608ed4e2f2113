"""The processes: flags, wiring, start and shutdown, state across restarts."""
