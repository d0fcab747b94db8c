"""The rules that every runtime agrees on, whatever its ranks run as. Pure."""

COMMAND_RUNS = b"\x06"
"""The first byte that the supervisor of a command beside a rank writes: all that follows is the command's own."""

KILL_AGAIN_SECONDS = 0.05
"""The pause between two SIGKILLs to what is left of an attempt: a process may fork between them."""
