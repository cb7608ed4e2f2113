"""KV events from engines: subscriptions, replays, ingest in time slices, and source states."""
