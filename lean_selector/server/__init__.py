"""What survives the process: written to a directory, and read back at the next start."""
