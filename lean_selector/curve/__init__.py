"""Keys for ZeroMQ's CURVE: made, read from files, asked for and given at a handshake."""
