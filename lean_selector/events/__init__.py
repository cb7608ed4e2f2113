"""KV events from engines: subscriptions, replay, ingest in turns, and the state of each source."""
