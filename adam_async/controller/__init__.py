"""The cluster map on one, three or five controllers: its rules, the group that agrees on it, and its clients.

A role sends its request through this package's client to the leading controller. `service.py` receives and
checks the request (`permissions.py`); `consensus_node.py` proposes a change as a command of one replicated
log. Each controller applies the committed commands in log order (`replicated_state.py`) by the rules in
`state.py`. The leader then answers the request, and the watches of the map.

    state.py                      the cluster map as a state machine: nodes, losses, the order of all rules
    store_rules.py                rules of stores: placement on servers, phases, numbers of clients
    bundle_rules.py               rules of bundles: copies on servers; failover to the next member in sync
    training_rules.py             rules of the training run; slots of its workers
    permissions.py                access control: the keys and fields that each role may set
    records.py                    limits of one record

    replicated_state.py           map and client sessions; a repeated request is applied only once;
                                  checks that commands, states and logs are readable
    service.py                    the controller role: requests, compare-and-set, watches, proposed losses
    failure_detector.py           suspected nodes, which have no link to the leader, and their deadlines
    consensus_node.py             shell of the core: proposals, linearizable reads, group commit, snapshots;
                                  the core's clock, which leaves out stalls of the process
    consensus/                    pure core: Multi-Paxos with a stable leader, as in Raft; heartbeats
    log_file.py                   the synced log on disk
    peer_controllers.py           links to the other controllers, and the next change of the membership
    learned_map.py                first map of a restarted single controller, from the servers of stores
    bootstrap.py                  first voters of a group; a controller with an empty disk joins a group

    client.py                     `Membership`: join a cluster, follow the map, change records of the map
    map_client.py                 numbered requests (compare-and-set), repeated over all links and leaders
    leader_connection.py          search for the leader, and for the next one after its loss
    role.py                       the base class of all roles: listener, membership, tasks, statistics
    status_log.py                 log lines about the group and the map
"""
