"""Replicas as processes of this machine: the executor, the gang's files, and the warden that outlives its caller."""
