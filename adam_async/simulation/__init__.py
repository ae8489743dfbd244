"""Deterministic simulation of clusters: the shipped code on virtual time, networks and disks, with faults.

`runner.py` draws a plan of faults from a seed and runs a scenario with it. The scenario starts programs on
machines (`nodes.py`), whose steps, connections and files go through `loop.py`, `network.py` and `disk.py`.
`faults.py` carries out the plan, and a checker (`checkers/`) raises a `Violation` if an invariant does not
hold. A seed gives the same run in every process.

    loop.py, tasks.py         the event loop on virtual time, with the replay hash; its futures and tasks
    host.py                   one machine, as the loop sees it: clock, state, steps of its code
    nodes.py                  the world of a run: machines that start, crash and freeze; `simulate`
    network.py, wire.py       hosts and wires between them: latency, bandwidth, network partitions
    connection.py             one end of a TCP connection: flow control, end of stream, resets
    disk.py, disk_model.py    the disk interface with its times and errors; page cache and effects of a crash
    pool.py                   a compute pool without threads: jobs take virtual time

    scenario.py, scenarios/   the form of a scenario, and its record of events; all scenarios
    plan.py, faults.py        a plan as data: options and faults; crashes, kills, freezes, cuts, resets
    checkers/                 invariants: exactly once, equal copies, agreement, recovery from disks
    linearizability.py        whether the answers to clients of a map fit one order of all operations

    runner.py                 runs by their seeds: result, whether a seed counts, digest of many
    shrinking.py              the smallest plan that still fails (delta debugging)
    work.py, process_pool.py  seeds, repetitions and shrinks as work of child processes; these processes
    soak.py                   the file of finished seeds, from which a long test continues
    trace.py                  one run as Trace Event JSON for Perfetto
"""
