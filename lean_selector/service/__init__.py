"""Routes and handlers of both services, and what observes them: the gate, access, metrics, logs."""
