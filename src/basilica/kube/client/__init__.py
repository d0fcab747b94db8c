"""Calls to the Kubernetes API."""
