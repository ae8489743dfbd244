"""Clusters: all roles in one event loop, or as processes, which a supervisor watches and restarts.

`setup.py` checks the caller's arguments. `local.py` then opens all roles in the caller's event loop.
`processes.py` starts them through a launcher instead, and `supervision.py` restarts a lost role if the run
still has its state. In both clusters the driver of the run is in the caller's process.

    local.py           `LocalCluster`: all roles in one event loop, joined by local links
    sync.py            `LocalCluster` without `await`, for scripts and notebooks, on a thread of its own
    setup.py           the arguments of both clusters, checked and in one value; the block of both, `Cluster`

    processes.py       `ProcessCluster`: start of the roles in order, training, scaling of the workers
    supervision.py     the supervisor: restart of a lost role, or the death that ends the run
    launcher.py        the interface of all launchers: `Launcher`, `RoleSpec`, `RestartPolicy`
    parent_pipe.py     a child's stdin: its orders and keys; the child ends with its parent (no orphans)

    roles/             the place of a single role in its process; controllers, parameter servers
    networks.py        networks of a process: over TCP, slowed on purpose (stragglers), several by scheme
    external_data.py   standalone data servers: invited at the start, released at the end
"""
