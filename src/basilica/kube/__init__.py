"""Kubernetes: a client of its API, and manifests."""
