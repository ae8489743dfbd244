"""Facts about a cluster, from which hostile peers make messages: ids, versions, next numbers and clocks."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Part, Push
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.state import ServerState
from adam_async.run.cluster_map import ClusterMap
from tests.simulation.scenarios.training_cluster import TrainingCluster
from tests.simulation.scenarios.valid_messages import Facts
from transport import Identity

REPLICA = 99
"""Number of a replica that hostile peers claim and no run has."""


def facts_of(cluster: TrainingCluster, target: str, *, sender: Identity, map_session: int) -> Facts:
    """Return the present facts for a peer that is about to attack a target."""
    seen, controllers = cluster.map, cluster.controllers
    server = cluster.servers.get(target)
    state = server.state if server is not None else None
    shards = list(state.shards.values())[:2] if state is not None else []
    leader = controllers.get(cluster.leader) or next(iter(controllers.values()))
    run, epoch = seen.run, seen.epoch
    assert run is not None
    return Facts(
        run=run.id,
        store=f"{sender.node}-{sender.incarnation:x}",
        generation=seen.generation,
        shards=tuple(int(shard.spec.id) for shard in shards) or (0, 1),
        sizes=tuple(shard.spec.size for shard in shards) or (4, 4),
        dtype=str(shards[0].values.dtype) if shards else "float32",
        session=sender.incarnation,
        incarnation=sender.incarnation,
        others_session=cluster.newest_session,
        replica=REPLICA,
        others_replica=0,
        replica_generation=seen.replica_generation(0),
        epoch=epoch.number if epoch is not None else 1,
        clock=1,
        group=leader.replicated_state.group,
        core_term=leader.group.term,
        version=seen.version,
        map_session=map_session,
        node=sender.node,
        role=sender.role,
        address=f"tcp://{sender.node}:1",
    )


def push_to(
    state: ServerState, shards: Sequence[Shard], *, replica: int, session: int, generation: int
) -> Push:
    """Return the first push of a session to some shards of a server, with replica generation `generation`."""
    count = len(shards)
    return Push(
        store=state.store,
        session=session,
        incarnation=generation,
        replica=replica,
        clock=0,
        weight=1,
        rate=0.0,
        generation=state.generation,
        parts=(Part(factors=False, count=count),),
        shards=tuple([int(shard.spec.id) for shard in shards]),
        numbers=1,
        versions=0,
        own_applied=0,
    )


def next_push(
    server: ParameterServer, cluster: ClusterMap, *, by_client: bool
) -> tuple[Push | None, NDArray[Any]]:
    """Return the next push of a worker or client to a server's first shard, with a gradient of zeros.

    The push is None if no worker or client has pushed yet.
    """
    for served in reversed(tuple(server.served.values())):
        store, state = cluster.store(served.store.id), served.state
        if store is None or bool(store.program) == by_client or not state.shards:
            continue
        shard = next(iter(state.shards.values()))
        replicas = {generation: replica for replica, (generation, _) in cluster.pushers(store).items()}
        for (session, generation), number in reversed([*shard.last_number.items()]):
            if generation in replicas:
                push = push_to(
                    state, [shard], replica=replicas[generation], session=session, generation=generation
                )
                return msgspec.structs.replace(push, clock=1, numbers=number + 1), np.zeros(
                    shard.spec.size, shard.values.dtype
                )
    return None, np.zeros(0)


def next_clock(server: ParameterServer) -> tuple[int, tuple[int, ...]]:
    """Return the clock that a server reaches next, and the numbers of its shards."""
    state = server.state
    if state is None:
        return 1, (0,)
    reached = min((clock for shard in state.shards.values() for clock in shard.clocks.values()), default=0)
    return reached + 1, tuple([int(number) for number in state.shards])
