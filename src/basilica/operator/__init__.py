"""The operator: the controller of all runs of a cluster, as one process of several of which one acts."""
