"""Runs of seeds with other faults than these draw."""

import msgspec

from tests.simulation.plan import Case, Fault, Plan, in_order
from tests.simulation.runner import draw_case
from tests.simulation.scenarios.training import TRAIN
from tests.simulation.scenarios.training_faults import SERVER_KINDS


def with_faults(case: Case, *faults: Fault) -> Case:
    """The same run with these faults alone."""
    return msgspec.structs.replace(case, plan=msgspec.structs.replace(case.plan, faults=in_order(faults)))


def plain_training(seed: int) -> Case:
    """The run of a seed without the options that it draws, and without the faults of servers with copies."""
    case = draw_case(TRAIN, seed)
    options = msgspec.structs.replace(case.plan.options, settings={})
    faults = tuple(fault for fault in case.plan.faults if fault.kind not in SERVER_KINDS)
    return msgspec.structs.replace(case, plan=Plan(options=options, faults=faults))
