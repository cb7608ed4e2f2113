"""The processes: what they are told, how they start and stop, what survives a restart."""
