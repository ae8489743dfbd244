"""Deterministic simulation of clusters: the shipped code on virtual time, networks and disks, with faults.

`runner.py` draws a plan of faults from a seed and runs a scenario with it. The scenario starts programs on
machines (`scenario.py`), whose steps, connections and files go through `loop.py`, `network.py` and `disk.py`.
`faults.py` carries out the plan, and a checker raises a `Violation` if an invariant does not hold.
A seed gives the same run in every process.

    loop.py                   the event loop on virtual time, with the replay hash
    host.py                   one machine, as the loop sees it: clock, state, steps of its code; tasks
    network.py, wire.py       hosts and wires between them: latency, bandwidth, network partitions
    connection.py             one end of a TCP connection: flow control, end of stream, resets
    shared.py                 links in shared memory between machines of one host
    disk.py, disk_model.py    the disk interface with its times and errors; page cache and effects of a crash
    random_streams.py         seeded streams of random numbers, one for each concern
    pool.py                   a compute pool without threads: jobs take virtual time

    scenario.py               a scenario, its record and its world of machines
    plan.py, faults.py        a plan as data: options and faults, and the smallest one that still fails (delta
                              debugging); crashes, kills, freezes, cuts, resets
    fault_points.py           the fault points of product code, which a run switches on
    linearizability.py        whether the answers to clients of a map fit one order of all operations

    runner.py                 runs by their seeds: result, whether a seed counts, digest of many
    work.py                   seeds, repetitions and shrinks as work of child processes; these processes
    command.py, simulate.py   the command `simulate`: its options; seeds in child processes, their results

    scenarios/                clusters with their clients, faults and hostile peers
    checkers/                 invariants, checked while a scenario runs and at its end
"""
