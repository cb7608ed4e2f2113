"""Routes and handlers of both services, and the parts that every request passes: routing by path,
access check, metrics, logs."""
