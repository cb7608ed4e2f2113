"""Commands other than the services: demo, check, top, simulate, replay, tune, deploy and keys."""
