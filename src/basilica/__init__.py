"""Elastic distributed training that tells you what is going on."""

__version__ = "0.1.0"
__all__ = ["__version__"]
