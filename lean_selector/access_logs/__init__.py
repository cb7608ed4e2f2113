"""Lines that gateways write to their access logs at the end of each request, read as ends."""
