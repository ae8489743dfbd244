"""Invariants of simulated runs: each checker follows one kind of state, and raises a `Violation`.

A scenario reports entries, maps, pushes, answers or states on disks to a checker, which compares them with
earlier ones. A checker keeps its memory when machines crash, so it notices a promise that a restart breaks.
Scenarios compare the copies of bundles at intervals, and check the answers of controllers at the end.

Stores and checkpoints:
    store_pushes.py          start here: each push applied exactly once; versions, staleness, sums in bsp
    saved_pushes.py          pushes to a store that returns from disks: permitted loss, none if durable
                             states on disks: only those that servers gave, none older than before
    saved_pins.py            pins: the bytes of their place in the log; the same ones until they are removed
    bundles.py               copies of a bundle: one log, one primary, equal values; clocks of clients
    checkpoints.py           checkpoints: all shards at one clock in bsp, enough updates in every mode
    fences.py                answered groups: no later push of a generation that had ended
    group_sets.py            groups that shards have counted, compared with the result of each epoch
Controllers:
    commits.py               equal entries and states; a new leader has all committed entries; one leader per
                             term; votes and acknowledged entries, kept across restarts; liveness
    maps.py                  cluster map: one primary and one dealer at a time, no return to old states
    histories.py             answers to clients in one order (linearizability), watches without gaps
"""
