"""Progress of a run: planned changes with their notices, answers and files, and the order of samples."""
