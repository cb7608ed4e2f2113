"""The mesh of replicas: publish, subscribe, catch up, and recover the index from a peer."""
