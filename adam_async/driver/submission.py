"""Submission of a program to the controllers, changes by its driver, and takeover by another driver."""

from collections.abc import Callable, Iterable

import msgspec

from adam_async.controller.client import Membership
from adam_async.errors import RunFailed
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import joined_evaluations, newest_and_best
from adam_async.run.result import EpochResult
from adam_async.run.training_program import ProgramRecord, cut_blob


async def submit(membership: Membership, record: ProgramRecord) -> None:
    """Submit a program, as its driver; the blob is cut into pieces if it does not fit into one value of the
    map.

    Raises:
        RunFailed: The blob is too long even in pieces, or the controller refused the record.
        DeadlineExceeded: No controller led, or answered.
    """
    try:
        whole, pieces = cut_blob(record)
    except ValueError as error:
        raise RunFailed(
            f"program {record.id} cannot be submitted: {error}; use fewer layers or partitions"
        ) from None
    for number, piece in enumerate(pieces):
        await membership.update(f"run/{number}", lambda _, piece=piece: piece)  # type: ignore[misc]
    await membership.update("run", lambda _: whole)


async def update_program(
    membership: Membership, change: Callable[[ProgramRecord], ProgramRecord | None]
) -> None:
    """Change the program, as its driver: `change` returns the new record from the newest, or None to keep it.

    Fields in `training_program.FIXED` keep their submitted values, and the program of another driver stays
    unchanged. For errors see `Membership.update`.
    """

    def changed(newest: ClusterMap) -> ProgramRecord | None:
        """Return the changed program, if this member drives it."""
        run = newest.run
        record = change(run) if run is not None and run.driven_by == membership.member else None
        return record.without_fixed() if record is not None else None

    await membership.update("run", changed)


def with_evaluations(record: ProgramRecord, epochs: Iterable[EpochResult], *, ended: int) -> ProgramRecord:
    """Return a program with the evaluations of its ended epochs, of which `ended` is the last one."""
    new = [each.evaluation for each in epochs if each.epoch <= ended]
    evaluated = newest_and_best(joined_evaluations(record.evaluated, new))
    return msgspec.structs.replace(record, evaluated=evaluated)


async def take_over(membership: Membership, run: str) -> None:
    """Become the driver of a program that waits for one.

    Raises:
        RunFailed: Another driver was faster, or the program is over, or the map has another program or none.
        DeadlineExceeded: No controller led, or answered.
    """
    node, incarnation = membership.member

    def taken(newest: ClusterMap) -> ProgramRecord | None:
        """Return the program with this driver, if it still waits for one."""
        record = newest.run
        if record is None or record.id != run or record.over or newest.driven:
            return None
        return msgspec.structs.replace(record, driver=node, incarnation=incarnation).without_fixed()

    await membership.update("run", taken)
    now = membership.map.run
    if now is None or now.id != run:
        raise RunFailed(f"run {run} was replaced by {now.id if now is not None else 'none'}")
    if now.driven_by != membership.member:
        raise RunFailed(f"run {run} was taken over by another driver, {now.driver}")
    if now.over:
        raise RunFailed(f"run {run} is over: {now.reason or now.phase}")
