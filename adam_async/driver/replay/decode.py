"""Pure: decodes the logs of servers and workers into a recording that a replay can use."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.manifest import check_kept_step
from adam_async.driver.replay.record_file import Log, load_record
from adam_async.driver.replay.recording import Header, Numbers, Order, Reads, Recording
from adam_async.errors import RecordError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.replay_log import (
    JOINED,
    NOT_APPLIED,
    SUMMED,
    ReplicaGeneration,
    read_order_log,
)
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from adam_async.run.shard_table import ShardTable
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.train_step import StepSpec
from adam_async.run.user_code import NamedStep
from adam_async.worker.replay_log import GroupRead, Reader, read_read_log


def read_recording(
    data: bytes,
    *,
    origin: str,
    layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
    step: NamedStep | None = None,
) -> Recording:
    """Read the bytes of a record's file.

    Args:
        origin: Name of the file, for errors.
        layers: Kinds of layers that the model may have.
        step: Step of the run, if the run trained one.

    Raises:
        ConfigError: The step is not that of the record.
        RecordError: The file is no record, has another version, is damaged, or lacks the log of a node.
    """
    header, logs = load_record(data, origin=origin)
    model: RunModel | None = recorded_step(header, step)
    if model is None:
        model = Network(ModelSpec.from_dict(header.spec), header.options().dtype, layers=layers)
    return make_recording(header, logs, model)


def recorded_step(header: Header, step: NamedStep | None) -> StepModel | None:
    """Return the step of a recorded run; None if the run trained a network.

    Raises:
        ConfigError: The caller's step is not that of the record; the error names the right options.
    """
    there = StepSpec.from_dict(header.spec)
    check_kept_step(header.spec, step, "the record")
    if there is None or step is None:
        return None
    return StepModel(step.step, there, keep_going=header.options().keep_going)


def make_recording(header: Header, logs: Sequence[Log], network: RunModel) -> Recording:
    """Join the logs of all nodes of a run.

    Raises:
        RecordError: A log cannot be read or is missing, such as the log of a lost worker.
    """
    config = header.options()
    table = table_of(network, shard_bytes=config.shard_bytes)
    readers: dict[Reader, Reads] = {}
    for log in logs:
        if log.role == "worker":
            reader, reads = _read_reads(log, network, table, config)
            readers[reader] = reads
    orders: dict[int, Order] = {}
    for log in logs:
        if log.role == "ps":
            orders.update(_read_orders(log, readers))
    missing = [spec.id for spec in table.shards if spec.id not in orders]
    if missing:
        raise RecordError(f"the record has no order of shards {missing[:8]}; a server's log is missing")
    return Recording(
        header=header,
        reads={reads.replica: reads for reads in readers.values()},
        orders=tuple(orders[spec.id] for spec in table.shards),
    )


def _read_reads(log: Log, network: RunModel, table: ShardTable, config: Config) -> tuple[Reader, Reads]:
    names = [p.name for p in network.parameters]
    try:
        reader, found = read_read_log(log.data, frozen=network.frozen, local=config.local_steps)
        groups = list(found)
    except ValueError as error:
        raise RecordError(f"the log of {log.node} is damaged: {error}") from None
    shards = len(table.shards)
    for group in groups[:1]:
        _check_tensors(group, table, log.node)
    return reader, Reads(
        replica=reader.replica,
        epochs=np.array([group.epoch for group in groups], np.int64),
        numbers=np.array([group.number for group in groups], np.int64),
        clocks=np.array([group.clock for group in groups], np.int64),
        progress=np.array([group.progress for group in groups], np.float64),
        versions=np.array(
            [[v for name in names for v in group.versions[name]] for group in groups], np.int64
        ).reshape(-1, shards),
        steps=np.array([[group.local[name] for name in names] for group in groups], np.int64).reshape(
            -1, len(names)
        ),
    )


def _check_tensors(first: GroupRead, table: ShardTable, node: str) -> None:
    """Check that the first group in a worker's log has the tensors of this model, with all their shards."""
    logged = {name: len(versions) for name, versions in first.versions.items()}
    wanted = {name: len(shards) for name, shards in table.by_tensor.items()}
    if logged != wanted:
        raise RecordError(f"{node} logged other tensors than the model has: {logged}, not {wanted}")


def _read_orders(log: Log, readers: Mapping[Reader, Reads]) -> dict[int, Order]:
    try:
        replica_generations, entries = read_order_log(log.data)
    except ValueError as error:
        raise RecordError(f"the log of {log.node} is damaged: {error}") from None
    for each in replica_generations:
        if Reader(each.replica, each.session, each.incarnation) not in readers:
            raise RecordError(
                f"{log.node} applied pushes of a worker of replica {each.replica} that left "
                "before the run ended, with its log of reads; such a run cannot be replayed: record it again"
            )
    return {shard: _order(shard, replica_generations, found, log.node) for shard, found in entries.items()}


def _order(
    shard: int, replica_generations: Sequence[ReplicaGeneration], entries: NDArray[Any], node: str
) -> Order:
    if entries.size and int(entries["life"].max()) >= len(replica_generations):
        raise RecordError(f"the log of {node} is damaged: shard {shard} names a worker that it does not list")
    flags = entries["flags"]
    begins = np.flatnonzero((flags & JOINED) == 0)
    if entries.size and (not begins.size or begins[0] != 0):
        raise RecordError(f"the log of {node} is damaged: shard {shard} begins in the middle of a batch")
    applied = (flags & NOT_APPLIED) == 0
    summed = (flags & SUMMED) != 0
    return Order(
        shard=shard,
        replicas=np.array([each.replica for each in replica_generations], np.int64)[entries["life"]],
        clocks=entries["clock"].astype(np.int64),
        refused=~applied,
        bounds=np.append(begins, entries.size),
        versions=_versions(begins, applied, summed),
        summed=bool(summed.any()),
    )


def _versions(begins: Numbers, applied: NDArray[np.bool_], summed: NDArray[np.bool_]) -> Numbers:
    """Return the version after each batch: +1 for each applied push, or for each applied sum."""
    if not begins.size:
        return np.zeros(0, np.int64)
    counts = np.add.reduceat(applied.astype(np.int64), begins)
    return np.cumsum(np.where(summed[begins], np.minimum(counts, 1), counts))
