"""HTTP/1.1 over one connection, by hand on httptools. Knows nothing of selectors."""
