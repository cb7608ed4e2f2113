"""Routes and handlers of both services, and what every request passes: gate, access check, metrics,
logs."""
