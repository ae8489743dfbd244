"""Pure: the file of a recorded run, and its logs, decoded into a recording that a replay can use.

Layout, integers little-endian:

    magic      20 bytes, `MAGIC`: name and version of the format
    size, crc  4 bytes each, of the header
    header     JSON: `Header` of the run, and a `Section` for each bundle
    sections   the bytes of each, one after the other, in the format of `parameter_server/replay_log.py`

The reader checks the sizes, and the checksum of each part, before it uses the part.
"""

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.checkpoint import check_kept_step
from adam_async.driver.replay.record_head import MAGIC, check_magic
from adam_async.driver.replay.recording import Header, Numbers, Order, Reads, Recording
from adam_async.errors import RecordError
from adam_async.messages.body import Count
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.replay_log import (
    JOINED,
    NOT_APPLIED,
    SKIPPED,
    SUMMED,
    LogContent,
    ReplicaGeneration,
    read_order_log,
)
from adam_async.run.partition import table_of
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.train_step import StepSpec
from adam_async.run.user_code import NamedStep
from adam_async.worker.pusher import reads_type

_FRONT = Struct("<II")


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The log of one bundle in the file."""

    home: str
    """Name of the bundle."""
    size: Count
    crc: Count


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    header: Header
    sections: tuple[Section, ...]


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """The log of one bundle."""

    home: str
    data: bytes


def dump_record(header: Header, logs: Sequence[Log]) -> list[bytes]:
    """Write a record as the parts of its file."""
    head = _Head(
        header=header,
        sections=tuple(Section(home=log.home, size=len(log.data), crc=crc32(log.data)) for log in logs),
    )
    text = msgspec.json.encode(head)
    return [MAGIC, _FRONT.pack(len(text), crc32(text)), text, *(log.data for log in logs)]


def load_record(data: bytes, *, origin: str) -> tuple[Header, list[Log]]:
    """Read the bytes of a record's file.

    Raises:
        RecordError: The file is no record, of another version, truncated or damaged.
    """
    check_magic(data, origin)
    begin = len(MAGIC) + _FRONT.size
    size, crc = _FRONT.unpack_from(data, len(MAGIC)) if len(data) >= begin else (0, 0)
    if len(data) < begin + size:
        raise RecordError(f"{origin} is truncated in its header: it has {len(data)} bytes; record again")
    text = data[begin : begin + size]
    if crc32(text) != crc:
        raise RecordError(f"{origin} has a damaged header: its checksum is wrong; record again")
    try:
        head = msgspec.json.decode(text, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{origin} has a header that this version does not read: {error}") from None
    return head.header, _logs(data, begin + size, head.sections, origin)


def _logs(data: bytes, at: int, sections: Sequence[Section], origin: str) -> list[Log]:
    expected = at + sum(section.size for section in sections)
    if len(data) != expected:
        raise RecordError(f"{origin} has {len(data)} bytes, but its header lists {expected}")
    logs = []
    for section in sections:
        part = data[at : at + section.size]
        at += section.size
        if crc32(part) != section.crc:
            raise RecordError(f"{origin} is damaged in the log of {section.home}: its checksum is wrong")
        logs.append(Log(home=section.home, data=part))
    return logs


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
        RecordError: The file is not a record, has another version, is damaged, or lacks a bundle's log.
    """
    header, logs = load_record(data, origin=origin)
    model: RunModel | None = recorded_step(header, step)
    if model is None:
        model = Network(ModelSpec.from_dict(header.spec), header.options().dtype, layers=layers)
    return make_recording(header, logs, model)


def recorded_step(header: Header, step: NamedStep | None) -> StepModel | None:
    """Return the step of a recorded run; None if the run trained a network.

    Raises:
        ConfigError: The caller's step is not the record's; the error names the right options.
    """
    there = StepSpec.from_dict(header.spec)
    check_kept_step(header.spec, step, "the record")
    if there is None or step is None:
        return None
    return StepModel(step.step, there, keep_going=header.options().keep_going)


def make_recording(header: Header, logs: Sequence[Log], network: RunModel) -> Recording:
    """Join the logs of all bundles of a run.

    Raises:
        RecordError: A log cannot be read or is missing.
    """
    config = header.options()
    table = table_of(network, shard_bytes=config.shard_bytes)
    contents = {log.home: _content(log) for log in logs}
    # In replica order, so that a client without predecessor has its replica's number.
    clients = sorted({client for each in contents.values() for client in each.clients})
    number_of = {client: number for number, client in enumerate(clients)}
    steps: dict[ReplicaGeneration, dict[int, bytes]] = {client: {} for client in clients}
    orders: dict[int, Order] = {}
    for home, content in contents.items():
        for step in content.steps:
            # Each bundle has the reads of the steps that reached it: a lost worker's steps may differ.
            steps[content.clients[step.client]].setdefault(step.clock, step.reads)
        numbers = np.array([number_of[client] for client in content.clients], np.int64)
        for shard, entries in content.entries.items():
            orders[shard] = _order(shard, numbers, entries, home)
    missing = [spec.id for spec in table.shards if spec.id not in orders]
    if missing:
        raise RecordError(f"the record has no order of shards {missing[:8]}; a bundle's log is missing")
    dtype = reads_type(len(table.shards), len(table.by_tensor))
    return Recording(
        header=header,
        reads={number_of[client]: _reads(client.replica, steps[client], dtype) for client in clients},
        orders=tuple(orders[spec.id] for spec in table.shards),
    )


def _content(log: Log) -> LogContent:
    try:
        return read_order_log(log.data)
    except ValueError as error:
        raise RecordError(f"the log of {log.home} is damaged: {error}") from None


def _reads(replica: int, steps: Mapping[int, bytes], dtype: np.dtype[Any]) -> Reads:
    """Join the steps of one client."""
    clocks = sorted(steps)
    for clock in clocks:
        if not steps[clock] or len(steps[clock]) % dtype.itemsize:
            raise RecordError(
                f"the record is damaged: the step of replica {replica} with clock {clock} has reads of "
                f"{len(steps[clock])} bytes, but each group of this model has {dtype.itemsize}"
            )
    groups = np.frombuffer(b"".join([steps[clock] for clock in clocks]), dtype)
    counts = [len(steps[clock]) // dtype.itemsize for clock in clocks]
    ends = np.cumsum(counts, dtype=np.int64)[:-1]
    changes = np.flatnonzero(np.diff(groups["epoch"])) + 1
    if (
        not np.isin(changes, ends).all()
        or not ((groups["progress"] >= 0) & (groups["progress"] <= 1e12)).all()
    ):
        raise RecordError(
            f"the record is damaged: replica {replica} trained groups of several epochs in one step, or a "
            "group at an impossible time"
        )
    return Reads(
        replica=replica,
        epochs=groups["epoch"].astype(np.int64),
        numbers=groups["number"].astype(np.int64),
        clocks=np.repeat(np.array(clocks, np.int64), counts),
        progress=groups["progress"].astype(np.float64),
        versions=groups["versions"].astype(np.int64),
        steps=groups["steps"].astype(np.int64),
    )


def _order(shard: int, clients: Numbers, entries: NDArray[Any], home: str) -> Order:
    flags = entries["flags"]
    begins = np.flatnonzero((flags & JOINED) == 0)
    if entries.size and (not begins.size or begins[0] != 0):
        raise RecordError(f"the log of {home} is damaged: shard {shard} begins in the middle of a batch")
    applied = (flags & NOT_APPLIED) == 0
    summed = (flags & SUMMED) != 0
    return Order(
        shard=shard,
        clients=clients[entries["client"]],
        clocks=entries["clock"].astype(np.int64),
        refused=~applied,
        skipped=(flags & SKIPPED) != 0,
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
