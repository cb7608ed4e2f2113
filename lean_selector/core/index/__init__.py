"""What is cached where: KV events in, prefix matches out."""
