"""Selection: workers, partitions, the cost and the choice."""
