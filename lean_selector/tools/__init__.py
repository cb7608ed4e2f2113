"""Commands other than the services: demo, check, deploy and keys."""
