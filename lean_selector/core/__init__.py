"""Pure state machines: no sockets, no logging. Time and randomness are arguments."""
