"""The processes: flags, wiring, start and stop, state over restarts."""
