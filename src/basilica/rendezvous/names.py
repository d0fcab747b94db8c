"""The names of our keys in a run's keyspace; all other keys there belong to torch and the user's program.

`basilica.mesh` repeats two of them, since it is copied alone into other people's images.
"""

ROOT = "/basilica"
WORLD = f"{ROOT}/world"  # {"target": N, "admitted": M}: how many ranks take part; those from M on are to wait
NOTICE = f"{ROOT}/notice"  # the planned change that ranks are told of; absent: none
MESH_READY = f"{ROOT}/mesh-ready"  # a key for each host that may begin
MESH_DEGRADED = f"{ROOT}/mesh-degraded"  # a key for each host that may begin without reaching all others
HOSTS = f"{ROOT}/hosts"  # the address at which each host answers the others
PAIRS = f"{ROOT}/pairs"  # which others each host reaches
ORDERS = f"{ROOT}/ranks"  # which attempt of a rank is to run, where the control plane is far away
ATTEMPTS = f"{ROOT}/attempts"  # the record of each attempt
RESULTS = f"{ROOT}/results"
REPORTS = f"{ROOT}/reports"
ACTIVITY = f"{ROOT}/activity"  # of each rank's program, by `progress.published`
SERIES = f"{ROOT}-series"  # each rank's reports over time; apart, since mirrors of `ROOT` do not need them
HEARD = f"{ROOT}/heard"  # which agents the rendezvous hears from, where they send heartbeats
