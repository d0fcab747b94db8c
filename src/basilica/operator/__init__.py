"""The operator: the controller of all runs of a cluster. Of several processes, the leader acts."""
