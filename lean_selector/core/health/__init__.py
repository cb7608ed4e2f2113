"""Health of ranks: failing ranks are temporarily ejected."""
