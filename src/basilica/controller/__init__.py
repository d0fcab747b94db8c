"""The controller: one turn, the loop of all turns, and what users can ask of it."""
