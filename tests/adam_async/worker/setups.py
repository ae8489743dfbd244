"""The setup of a training mode whose events no session takes."""

from adam_async.worker.training import GroupEvents, ModeSetup


def ignore(*_):
    """Take an event and do nothing."""


def mode_setup(servers, client, config, *, finished=ignore):
    """The setup of a mode that trains with these servers."""
    return ModeSetup(
        config=config,
        table=servers.table,
        buckets=servers.map.buckets,
        client=client,
        events=GroupEvents(finished=finished, landed=ignore, section_done=ignore),
    )
