"""The processes: command lines read, services wired, listened on and stopped."""
