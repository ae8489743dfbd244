"""A pytest plugin that removes one safeguard: the patch that `ADAM_ABLATION` names, as MODULE:FUNCTION."""

import os
from importlib import import_module

from tests.ablations.patches import Patch


def name_of(patch: Patch) -> str:
    """Return the name of a patch, MODULE:FUNCTION."""
    return f"{patch.__module__}:{patch.__name__}"


def patch_of(name: str) -> Patch:
    """Return the patch with a name, MODULE:FUNCTION."""
    module, _, function = name.partition(":")
    patch: Patch = getattr(import_module(module), function)
    return patch


if "ADAM_ABLATION" in os.environ:
    patch_of(os.environ["ADAM_ABLATION"])()
