"""The OpenAI-compatible door in front of the workers: `lean-selector gateway`."""
