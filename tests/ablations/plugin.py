"""A pytest plugin that removes one safeguard: the function of the patches that `ADAM_ABLATION` names."""

import os

from tests.ablations import copy_patches, patches

NAME = os.environ["ADAM_ABLATION"]

getattr(copy_patches if hasattr(copy_patches, NAME) else patches, NAME)()
