"""A cluster of processes gives each child the keys of its own role only."""

import msgspec
import pytest

from adam_async.cluster.launcher import LocalLauncher
from adam_async.cluster.parent_pipe import Orders
from adam_async.cluster.processes import CHILDREN, ProcessCluster, orders_for
from adam_async.errors import ConfigError
from adam_async.run.config import Config, Waits
from adam_async.run.token_file import derived_text, read_token_text
from transport import RoleKeys

TOKEN = "a token that nobody guesses"


def test_a_child_gets_the_keys_of_its_own_role_only() -> None:
    lines = orders_for(TOKEN, Waits(), profile_events=3)
    assert set(lines) == set(CHILDREN)
    for role, line in lines.items():
        orders = msgspec.json.decode(line, type=Orders)
        keys = read_token_text(orders.token)
        assert isinstance(keys, RoleKeys)
        assert (keys.role, orders.waits, orders.profile_events) == (role, Waits(), 3)
        assert TOKEN.encode() not in line


def test_one_address_for_copies_is_refused_for_roles_on_other_machines() -> None:
    config = Config(copies_bind="tcp://10.1.0.1:0", data="digits")
    with pytest.raises(ConfigError, match=r"copies_bind=tcp://10\.1\.0\.1:0 is an address of this machine"):
        ProcessCluster(config, launcher=LocalLauncher({}))


def test_a_cluster_without_a_token_gives_none_and_keys_of_a_role_are_no_token() -> None:
    lines = orders_for("", Waits(), profile_events=0)
    assert {msgspec.json.decode(line, type=Orders).token for line in lines.values()} == {""}
    with pytest.raises(ConfigError, match="keys of role driver alone"):
        orders_for(derived_text(TOKEN, "driver"), Waits(), profile_events=0)
