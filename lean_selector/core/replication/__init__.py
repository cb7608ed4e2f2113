"""What replicas tell each other, and what hearing it does."""
