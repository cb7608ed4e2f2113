"""The index of cached blocks: applies KV events, and matches prompts."""
