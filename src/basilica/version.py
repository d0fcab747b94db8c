"""The version of this package: one definition, for the package's metadata, the server and the commands."""

__version__ = "0.1.0"
