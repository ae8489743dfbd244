"""Submission of a program to the controllers, and its changes by its driver."""

from collections.abc import Callable

from adam_async.controller.client import Membership
from adam_async.errors import RunFailed
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.program_record import ProgramRecord, cut_blob


async def submit(membership: Membership, record: ProgramRecord) -> None:
    """Submit a program, as its driver; its blob goes in pieces if one value of the map cannot hold it.

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

    Fields in `program_record.FIXED` keep their submitted values. For errors see `Membership.update`.
    """

    def changed(newest: ClusterMap) -> ProgramRecord | None:
        record = change(newest.run) if newest.run is not None else None
        return record.without_fixed() if record is not None else None

    await membership.update("run", changed)
