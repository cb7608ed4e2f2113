"""Selection: workers, partitions, the cost of a rank, and the choice."""
