"""What only observes: counters, metrics and logs. Knows no HTTP."""
