"""The environment of a rank: the names of our variables, each defined once."""

COMMAND_MARK = "BASILICA_EXEC"
"""Set for a command that was started beside a rank, and so for all that it started: its processes are known by it."""
