"""The bench probe: two processes, one on each of two nodes, measure the link between them. Nothing beyond the standard
library is needed; torch is used where it is installed."""
