"""The client for code without an event loop. `aio` has the same files, for one."""
