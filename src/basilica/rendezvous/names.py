"""The names of all that we keep in a run's keyspace; beside it is only what torch and the user's program keep there.

`basilica.mesh` repeats two of them, since it is copied alone into other people's images.
"""

ROOT = "/basilica"
WORLD = f"{ROOT}/world"  # {"target": N}: how many ranks take part
MESH_READY = f"{ROOT}/mesh-ready"  # a key for each host that may go
MESH_DEGRADED = f"{ROOT}/mesh-degraded"  # a key for each that may go without reaching all others
HOSTS = f"{ROOT}/hosts"  # where each host answers the others
PAIRS = f"{ROOT}/pairs"  # which others each host reaches
ORDERS = f"{ROOT}/ranks"  # which attempt of a rank is to run, where the control plane is far away
ATTEMPTS = f"{ROOT}/attempts"  # what became of each
RESULTS = f"{ROOT}/results"
REPORTS = f"{ROOT}/reports"
SERIES = f"{ROOT}-series"  # what each rank reported over time; apart, since whoever follows the rest has no use for it
HEARD = f"{ROOT}/heard"  # which agents the rendezvous hears from, where they send heartbeats
