"""What runs where: active prompts and the load of each rank."""
