"""HTTP/1.1: the server's connections, parsed by httptools, and a client."""
