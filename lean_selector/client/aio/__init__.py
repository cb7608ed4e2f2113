"""The client for an event loop. `sync` has the same files, for code without one."""
