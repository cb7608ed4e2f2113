"""Routes and handlers of both services, and what applies to every request: gate, access, metrics,
logs."""
