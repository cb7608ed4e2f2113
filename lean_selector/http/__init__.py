"""HTTP/1.1: the server's side of a connection on httptools, and the client. Knows no selector."""
