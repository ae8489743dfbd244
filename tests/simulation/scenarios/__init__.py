"""The scenarios of `adam-async simulate`, by name. A new scenario needs a file here and a line below.

The file of a scenario draws a plan from a seed, starts the machines, carries out the faults, and checks the
invariants (`tests/simulation/checkers/`). The other files have clusters, clients and faults, often for
several scenarios.

`members`: one controller, and members that crash, freeze and are cut off
    members.py                                the scenario
    short_runs.py                             runs without gradients: each image counted once, or skipped
`controllers`, `restarts` and `clients`: consensus of the controllers
    controllers.py, restarts.py, clients.py   all kinds of faults; crashes of all controllers; members
    controller_group.py                       the controllers with their checkers; base of the three runs
    map_user.py                               users of the shipped `MapClient` and `Membership`
    controller_faults.py                      draws of faults
    machine_faults.py, disk_faults.py         targets; crashes, freezes, clocks; slow, full and damaged disks
    wire_faults.py                            cuts, low bandwidth, resets, lost answers
`pushes` and `power`: stores with copies of each shard (failover), and stores on disks
    pushes.py, power.py                       losses of single servers; power cuts, faults, return from disks
    cluster.py, disk_watch.py                 controllers and servers, also for `training`; observed disks
    power_faults.py                           losses of all servers, trouble of their disks, also for `cuts`
    bundle_watch.py                           observed copies of all bundles, also for `training`
    store_clients.py                          clients that push and pull, also for `training`
    server_faults.py                          faults of servers with copies, also for `training`
`vectors`: a random program of vectors beside NumPy, with the faults of `power` and links that break
    vectors.py                                the scenario; its program is in `checkers/vector_programs.py`
`sheets`: values that clients of one host read in place and keep, while clients are lost
    sheets.py                                 the scenario, and its readers
`cuts`: a run in bsp whose machines all lose their power
    cuts.py                                   the scenario, on the cluster of `training` with disks
`training`: a whole cluster learns while controllers, workers, servers and drivers are lost
    training.py                               the scenario
    training_cluster.py                       all roles, each on its own machine
    training_setups.py                        options of a run: consistency, partitions, rule, network
    training_faults.py                        faults of roles, clients and links, and the search for targets
    group_watch.py                            groups on the shards, compared with the results of epochs
`strangers`: unauthenticated clients, and members that break rules of the wire
    unauthenticated_clients.py                the scenario, with a server and its valid clients
    hostile.py, raw_wire.py                   invalid handshakes and frames; connections without a protocol
`hostile`: the cluster of `training`, with peers that send messages with bad fields
    hostile_training.py, hostile_peers.py     the scenario; the hostile peers, with the keys of a role
    hostile_members.py                       attacks on names, addresses and shares of the cluster map
    hostile_splits.py                         pushes in invented sessions that split the tables of shards
    hostile_facts.py, valid_messages.py       ids and clocks of the cluster; valid messages made from them
    bad_fields.py                             one bad field at a time; messages that no receiver may accept
"""

from tests.simulation.scenario import Scenario
from tests.simulation.scenarios.clients import CLIENTS
from tests.simulation.scenarios.controllers import CONTROLLERS
from tests.simulation.scenarios.cuts import CUTS
from tests.simulation.scenarios.hostile_training import HOSTILE
from tests.simulation.scenarios.members import MEMBERS
from tests.simulation.scenarios.power import POWER_CUTS
from tests.simulation.scenarios.pushes import PUSHES
from tests.simulation.scenarios.restarts import RESTARTS
from tests.simulation.scenarios.sheets import SHEETS_OF_STORES
from tests.simulation.scenarios.training import TRAIN
from tests.simulation.scenarios.unauthenticated_clients import UNAUTHENTICATED
from tests.simulation.scenarios.vectors import VECTORS

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        MEMBERS,
        TRAIN,
        CONTROLLERS,
        RESTARTS,
        CLIENTS,
        UNAUTHENTICATED,
        HOSTILE,
        PUSHES,
        POWER_CUTS,
        VECTORS,
        SHEETS_OF_STORES,
        CUTS,
    )
}
