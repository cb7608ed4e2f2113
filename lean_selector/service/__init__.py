"""Routes and handlers of both services, and the parts that every request passes: gate, access
check, metrics, logs."""
