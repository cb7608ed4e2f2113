"""The index: KV events in, prefix matches out."""
