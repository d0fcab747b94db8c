"""The controller: one turn, the loop of all turns, and the control plane that carries out users' requests."""
