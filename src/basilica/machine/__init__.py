"""Facts of this machine. Standard library only."""
