"""Sessions and the ranks that they are bound to."""
