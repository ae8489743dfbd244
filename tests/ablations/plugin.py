"""A pytest plugin that removes one safeguard: the function of the patches that `ADAM_ABLATION` names."""

import os

from tests.ablations import copy_patches, disk_patches, patches
from tests.adam_async.parameter_server.replication import ablations as core_patches


def remove(name: str) -> None:
    """Remove a safeguard by the name of its patch."""
    owner = next(each for each in (copy_patches, disk_patches, core_patches, patches) if hasattr(each, name))
    getattr(owner, name)()


if "ADAM_ABLATION" in os.environ:
    remove(os.environ["ADAM_ABLATION"])
