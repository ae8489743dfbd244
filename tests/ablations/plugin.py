"""A pytest plugin that removes one safeguard: the function of `patches` that `ADAM_ABLATION` names."""

import os

from tests.ablations import patches

getattr(patches, os.environ["ADAM_ABLATION"])()
