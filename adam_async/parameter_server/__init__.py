"""Parameter servers: shards in bundles, pushes applied exactly once, copies, disks.

A client numbers each push, and repeats it until the primary of the bundle answers (room `client`). On the
server `service.py` receives the push. If nothing waits for its shards, `at_once.py` applies and answers it in
that call. Otherwise `state.py` orders it by its number and forms batches, and each batch
becomes an entry of the bundle's log. With several copies `replication/` commits the entry once all members in
sync hold it. Then `bundle.py` takes the entry, `apply.py` changes the values, and `answers.py` acknowledges
the push. In bsp each push of gradients is an entry, and the server acknowledges it before it applies the sum
of the step.

The way of a push through its primary:
    served_store.py                                 start here: one bundle on a server, the shell of its state
    at_once.py                                      short way of a push that meets idle shards: one call
    state.py, events.py                             front of the primary: events in, effects out
    push_queue.py                                   exactly once: duplicates and gaps; batches of pushes
    bundle.py                                       shards after each entry: versions, clocks, staleness
    gradients.py                                    deltas and factors of a push, checked to be finite
    apply.py, store_work.py                         update rules on batches and bsp sums, in bounded pieces
    vector_steps.py                                 steps on vectors: sums, dot products, and their answers
    user_applier.py                                 rules of users, whose results are checked as a whole
    answers.py                                      acknowledgements, copies of values, refusals
    sheets.py                                       memory on which processes of the host read values
Shards, clocks and consistency (asp, ssp, bsp):
    shard.py, shard_group.py, storage.py            values, rule state, dedup and clock tables; their memory
    replica_clocks.py                               clocks of live replicas; generations that have ended
    waiting_requests.py                             pulls that wait for a clock, pushes that wait for an epoch
    bsp_barrier.py                                  bsp: contributions that wait for the other replicas
    kept_shards.py                                  shards at one clock or pin, for a reader or a disk
    shard_transfer.py                               messages of whole shards: first values, checkpoints
The role, its checks and its reports:
    service.py, store_host.py                       bundles from the cluster map; rounds of the loop; kernels
    question_checks.py                              refusal of questions that contradict the run; each push
                                                    session belongs to one peer and one replica
    mapped_workers.py                               workers of other processes on the memory of shards
    statistics.py                                   counts of versions, clocks and staleness
    replay_log.py                                   recorded order of pushes on each shard, for a replay
Copies on several servers, and failover:
    replication/                                    pure core: one log, commit, primary and secondary, joining
    bundle_copy.py                                  shell of the core on one server
    log_entries.py                                  log entries on the wire, in parts
    server_links.py, piece_link.py                  links among servers: entries, heartbeats, pieces
    members_watch.py                                silence, takeover, invitations, handover to the home
    shard_pieces.py, offered_pieces.py              state transfer to a joining server; arrays from its disk
Disks of servers:
    server_disk.py, store_disk.py                   folder of a server; one store in it
    bundle_saver.py, piece_states.py                changed pieces, copied between two entries; encoding;
                                                    durable pushes, whose entries go to the disk first
    entry_replay.py                                 durable pushes, replayed after a loss
    store_cuts.py, cut_folder.py                    bsp: bundles of a run at one clock; its name; files
    saved_stores.py                                 stores on a disk: report, reads after a loss, removal
    store_pins.py, pins.py                          states under names: those of a bundle; a folder each
"""
