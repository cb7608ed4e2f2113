"""Engines' KV events: subscriptions, replay, ingest in turns, and the state of each source."""
