"""`lean-selector check URL`: asks a selector and its engines, and says what mends what is wrong."""
