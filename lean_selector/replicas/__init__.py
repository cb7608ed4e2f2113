"""The mesh of replicas: publish, subscribe, catch up; recovery of the index from a peer."""
