"""The REST API and the console, around a control plane."""
