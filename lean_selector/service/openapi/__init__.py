"""The OpenAPI description of both services, imported on the first request for it."""
