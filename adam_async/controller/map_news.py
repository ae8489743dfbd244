"""Log lines about a cluster: the leading controller writes one for each important change of the map.

The lines have level `INFO`, because a program that starts a controller beside other roles reports such
changes itself. The command `controller` shows them.
"""

import logging
from collections.abc import Iterator

from adam_async.run.cluster_map import ClusterMap

logger = logging.getLogger(__name__)

NOTICE = "notice"
"""Key of a driver's `NodeRecord.info`: the newest sentence for the operator of the controllers."""


def report(before: ClusterMap, after: ClusterMap) -> None:
    """Log the changes from one map to the next."""
    for line in news_of(before, after):
        logger.info("%s", line)


def news_of(before: ClusterMap, after: ClusterMap) -> Iterator[str]:
    """Yield lines for members that join, leave or are lost, for phases of the run and drivers' notices."""
    for name, node in after.nodes.items():
        was = before.nodes.get(name)
        if was is None or was.live != node.live or was.incarnation != node.incarnation:
            yield f"{name} {'joined' if node.live else 'left' if node.left else 'is lost'}"
        elif node.info.get(NOTICE) != was.info.get(NOTICE):
            yield f"{name} reports: {node.info.get(NOTICE)}"
    run, ran = after.run, before.run
    if run is not None and (ran is None or (ran.id, ran.phase, ran.epoch) != (run.id, run.phase, run.epoch)):
        if run.phase == "failed":
            yield f"run {run.id} failed: {run.reason}"
        elif run.phase in ("preparing", "finished") or ran is None or ran.phase == "preparing":
            yield f"run {run.id} {PHASES[run.phase]}"


PHASES = {
    "preparing": "is preparing",
    "training": "is training",
    "between": "is training",
    "finished": "has finished",
    "failed": "has failed",
}
"""Phases of a run in words."""
