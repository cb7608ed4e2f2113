"""Which rank: workers, partitions, the cost and the choice."""
