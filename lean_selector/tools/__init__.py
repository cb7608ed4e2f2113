"""Commands other than the services: demo, check, top, simulate, replay, tune and deploy."""
