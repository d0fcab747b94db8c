"""The name and version of the distribution: one definition, for the metadata, the server, the commands and advice."""

__version__ = "0.1.0"

DISTRIBUTION = "basilica-train"
"""The name on PyPI. `basilica` alone is another project's package there; the import name is ours all the same."""


def pip_install(extra: str) -> str:
    """The command that installs one of our extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
