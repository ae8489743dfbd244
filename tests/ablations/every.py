"""All safeguards whose removal a seed or a test must find."""

from tests.ablations.at_once import AT_ONCE
from tests.ablations.bounds import BOUNDS
from tests.ablations.controllers import CONTROLLERS
from tests.ablations.copies import COPIES
from tests.ablations.dealers import DEALERS
from tests.ablations.disks import DISKS
from tests.ablations.group_sets import GROUP_SETS
from tests.ablations.learned import LEARNED
from tests.ablations.members import MEMBERS
from tests.ablations.shared import SHARED
from tests.ablations.vectors import VECTORS

EVERY = (
    *CONTROLLERS,
    *AT_ONCE,
    *BOUNDS,
    *COPIES,
    *DEALERS,
    *DISKS,
    *GROUP_SETS,
    *LEARNED,
    *MEMBERS,
    *SHARED,
    *VECTORS,
)
NAMED = {ablation.name: ablation for ablation in EVERY}
