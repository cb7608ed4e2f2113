"""The health of ranks: failing ranks are temporarily ejected."""
