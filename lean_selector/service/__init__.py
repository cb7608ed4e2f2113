"""Routes and handlers of both services, and what every request passes: the gate, access, metrics,
logs."""
