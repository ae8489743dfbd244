"""The system as the roles use it: clock, disk, machine, connections, processes, profiles and fault points.

The files of this room act and measure, and leave decisions to other rooms. Other rooms receive clock, entropy
and disk as arguments, so a simulation can replace them. A role dials a peer through `channel.py`, which
counts the link in `traffic.py`.

    clock.py                      clocks, entropy, a timer for the next deadline, the lag of the event loop
    disk.py                       files on a thread of its own: atomic writes, fdatasync, durable appends
    ordinary_files.py             opens ordinary files only, without a wait; reads with a limit; secrets
    blocking_thread.py            a thread for blocking calls, which never keeps its process
    machine.py                    cores, memory, NUMA nodes, BLAS; limits of control groups (cgroups)

    channel.py                    one link at a time to a peer: dial, patience, growing pauses (back-off)
    traffic.py                    messages and bytes, by peer and message type
    callbacks.py                  an error in a callback of the event loop ends its block, or the command
    loop_thread.py                a thread with an event loop; one for code of the user that may block

    role_handle.py                one process of a role, as its cluster sees it: address, log lines, end
    child_process.py              that process as a child of this one: start, kill, freeze
    health.py                     HTTP endpoint for liveness and readiness probes
    standard_streams.py           closed standard streams, characters that one lacks, idle readers
    kernel_cache.py               the folder of compiled kernels (Numba), in that of the user's caches

    timeline.py, trace_events.py  profile of a run: noted events; Trace Event JSON for Perfetto
    fault_points.py               fault injection in product code, and marks of events, for simulations
"""
