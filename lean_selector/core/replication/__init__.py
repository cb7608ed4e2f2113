"""Replication between replicas: events, catching up, restoring."""
