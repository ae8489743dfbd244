"""States of shards on disk behind a server: segment files, flush rounds, durable log entries, recovery.

The server marks changed shards in a `SegmentStore`. A flush round takes the newest state of each marked shard
(`rounds.py`), appends the states to segment files (`folder.py`), and syncs once. The next opening
scans all files, decides which states and entries count (`contents.py`), and repairs the folder.

    store.py                      start here: `SegmentStore`, the interface of the room; write-ahead log for
                                  durable pushes, with group commit
Writing:
    rounds.py                     write-back: many updates, one write, one sync; compaction
    folder.py, usage.py           the open folder that rounds and log share; files that are still in use;
                                  counts, and ages of unwritten updates
    frames.py, records.py         file format: frames with CRC-32 and proofs of durability; their payloads;
                                  names and order of states; flush interval and sizes. The log of the
                                  controllers consists of the same frames
    written_once.py               a folder that is written once and read whole, such as a checkpoint
Opening and recovery, after a crash or damage:
    opening.py                    lock, read and repair: cuts off torn tails, puts damaged files in quarantine
    scan.py, contents.py          content of one file; of the folder: newest states, damage, lost states
"""
