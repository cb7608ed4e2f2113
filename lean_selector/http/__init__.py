"""HTTP/1.1: server connections on httptools, and the client. Independent of selection."""
