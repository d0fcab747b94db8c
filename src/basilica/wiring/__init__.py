"""Composition roots: the only modules that name concrete adapters."""
