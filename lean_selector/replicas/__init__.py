"""The mesh of replicas: publish, subscribe, catch up; recover the index from a peer."""
