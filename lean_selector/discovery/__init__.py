"""Who the workers and the peers are, found out by itself."""
