"""HTTP/1.1: the server's side of connections, and a client. Both parse headers with httptools."""
