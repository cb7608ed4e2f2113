"""The active prompts, and the load of each rank."""
