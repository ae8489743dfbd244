"""Drills: faults of real server processes under a workload, measured and judged (chaos tests).

`plan.py` draws the faults from a seed, and `counter.py` or `training.py` runs the workload. `injection.py`
kills, freezes or cuts off the server of one primary after the other, and waits before each fault until the
newest map shows all copies in sync. `judging.py` judges the claims by the observations.

    counter.py              workload `counter`: numbered pushes; audit of lost and doubled ones (exactly once)
    training.py             workload `train`: pairs of runs without and with faults
    plan.py, injection.py   the faults, drawn from a seed; their injection, one at a time
    training_audit.py       acknowledged against applied pushes of a training run
    judging.py              claims, recovery times by kind of fault, equivalence test
    hosts.py                a launcher whose servers are on hosts with links that can be cut
    network_namespaces.py   hosts on one machine (Linux network namespaces): cut and slow links
    command.py, drill.py    the command `drill`: its options; its run, tables and file
"""
