"""Adapters of the `Store` port, and the rules that all of them share."""
