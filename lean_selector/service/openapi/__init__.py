"""The OpenAPI description of both services, imported when it is first asked for."""
