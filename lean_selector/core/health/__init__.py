"""Which ranks fail, and are given no work for a while."""
