"""Sessions, and the ranks to which they are bound."""
