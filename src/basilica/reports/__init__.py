"""Reports of ranks: the writer in their programs, the format of their files, and the relay to a control plane."""
