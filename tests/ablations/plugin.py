"""A pytest plugin that removes one safeguard: the function of the patches that `ADAM_ABLATION` names."""

import os

from tests.ablations import copy_patches, patches


def remove(name: str) -> None:
    """Remove a safeguard by the name of its patch."""
    getattr(copy_patches if hasattr(copy_patches, name) else patches, name)()


if "ADAM_ABLATION" in os.environ:
    remove(os.environ["ADAM_ABLATION"])
