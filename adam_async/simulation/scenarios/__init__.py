"""The scenarios of `adam-async simulate`, by name. A new scenario needs a file here and a line below."""

from adam_async.simulation.scenario import Scenario
from adam_async.simulation.scenarios.clients import CLIENTS
from adam_async.simulation.scenarios.controllers import CONTROLLERS
from adam_async.simulation.scenarios.hostile_training import HOSTILE
from adam_async.simulation.scenarios.members import MEMBERS
from adam_async.simulation.scenarios.power import POWER_CUTS
from adam_async.simulation.scenarios.pushes import PUSHES
from adam_async.simulation.scenarios.restarts import RESTARTS
from adam_async.simulation.scenarios.training import TRAIN
from adam_async.simulation.scenarios.unauthenticated_clients import UNAUTHENTICATED

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        MEMBERS,
        TRAIN,
        CONTROLLERS,
        RESTARTS,
        CLIENTS,
        UNAUTHENTICATED,
        HOSTILE,
        PUSHES,
        POWER_CUTS,
    )
}
