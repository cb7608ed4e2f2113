"""Which workers and peers there are, by discovery, and whether workers answer their polls."""
