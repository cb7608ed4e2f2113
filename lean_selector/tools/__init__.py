"""Commands beside the services: the demo, the check, and the files to deploy with."""
