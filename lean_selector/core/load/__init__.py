"""Active prompts, and the load of each rank."""
