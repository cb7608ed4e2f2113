"""Replication: events between replicas, catch-up after a gap, and restoring after a restart."""
