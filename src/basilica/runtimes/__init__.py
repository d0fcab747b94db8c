"""Adapters of the `Runtime` port, and the rules that all of them share."""
