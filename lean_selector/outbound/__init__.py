"""Requests that we make over HTTP ourselves: of engines, of a Kubernetes API server."""
