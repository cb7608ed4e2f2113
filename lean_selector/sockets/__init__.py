"""Everything that awaits on the network, except HTTP serving."""
