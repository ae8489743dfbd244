"""The port of the controller in a rank of torchrun."""

import pytest

from adam_async.errors import ConfigError
from adam_async.launch.environment import Layout, assigned_roles
from adam_async.launch.torchrun import TorchrunSettings, variables_of_rank

SMALL = Layout(controllers=1, servers=1, data_servers=1, workers=1)


def test_a_port_of_torchrun_is_that_of_the_controller() -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}

    assert variables_of_rank(rank, 0) == rank
    assert variables_of_rank({**rank, "MASTER_PORT": "40000"}, 0)["MASTER_PORT"] == "20000"
    assert assigned_roles(variables_of_rank(rank, 7000), SMALL).controllers == ("tcp://[::1]:7000",)
    with pytest.raises(ConfigError, match="port must be within 0 and 65535, not -1"):
        TorchrunSettings(port=-1)


def test_a_process_of_no_engine_is_told_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match="and one is missing: start with torchrun --nnodes"):
        variables_of_rank({"RANK": "0", "MASTER_ADDR": ""}, 0)
