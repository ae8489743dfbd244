"""Runs of seeds with other faults than these draw."""

import msgspec

from adam_async.simulation.plan import Case, Fault, in_order
from adam_async.simulation.runner import draw_case
from adam_async.simulation.scenarios.training import TRAIN


def with_faults(case: Case, *faults: Fault) -> Case:
    """The same run with these faults alone."""
    return msgspec.structs.replace(case, plan=msgspec.structs.replace(case.plan, faults=in_order(faults)))


def plain_training(seed: int) -> Case:
    """The run of a seed without the options that it draws."""
    case = draw_case(TRAIN, seed)
    options = msgspec.structs.replace(case.plan.options, settings={})
    return msgspec.structs.replace(case, plan=msgspec.structs.replace(case.plan, options=options))
