"""Pure state machines: no sockets, no clock, no random source of their own, no logging."""
