"""Pure: record and replay: the file of a recorded run, and its repetition in one process to the last bit.

`decode.py` joins the bundles' logs into a `Recording`. `playback.py` decides the order: a group trains once
the versions that it read exist, and a shard applies pushes once they are computed. `run.py` runs the roles'
code in this order: `worker.py` trains a group, and `shards.py` applies pushes.

    run.py                        start here: `Replay`, with the data of a run and the checks of its results
    playback.py                   order of groups and batches, by their dependencies; copies of old versions
    recording.py, decode.py       reads of each client, and order of pushes at each shard; made from the
                                  logs of a record's file: header, checksums
    record_head.py                the first bytes of a record's file
    worker.py                     one client: its groups, and its copy of the weights
    shards.py                     values and rules of all shards, with old versions; pushes on their way
"""
