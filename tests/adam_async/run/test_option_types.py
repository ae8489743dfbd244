"""Options constructed in Python are checked like those of a file."""

from typing import Any

import numpy as np
import pytest

from adam_async.errors import ConfigError
from adam_async.run.config import Config, Waits
from adam_async.run.option_sources import make_config


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"weights": "x"}, "weights must be one of auto, copy, aliased, not 'x'"),
        ({"epochs": "3"}, "epochs must be a whole number, not '3'"),
        ({"epochs": 2.0}, "epochs must be a whole number, not 2.0"),
        ({"epochs": 10**23}, "epochs must be a whole number of at most 64 bits, not one of 77 bits"),
        ({"seed": -(10**5000)}, "seed must be a whole number of at most 64 bits, not one of 16610 bits"),
        ({"epochs": True}, "epochs must be a whole number, not True"),
        ({"processes": 1}, "processes must be true or false, not 1"),
        ({"rate": "0.1"}, "rate must be a number, not '0.1'"),
        ({"model": None}, "model must be text, not None"),
        (
            {"data": "caf\udce9"},
            "data must be text in UTF-8, not 'caf\\udce9'; rename the file or folder, or name a link to it",
        ),
        ({"slow": "worker-1:0.2"}, "slow must be a list of texts, not 'worker-1:0.2'"),
        ({"slow": [0.2]}, "slow must be a list of texts, not [0.2]"),
        ({"waits": 3}, "waits must be a table of seconds, not 3"),
        ({"waits": {"call_s": 0}}, "waits.call_s must be a number of seconds above 0, not 0.0"),
    ],
)
def test_a_constructed_value_of_the_wrong_type_is_refused_with_its_option(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(**values)
    assert str(raised.value) == said


def test_numbers_of_numpy_are_numbers() -> None:
    built = Config(rate=np.float64(0.5), epochs=np.int64(3))  # type: ignore[arg-type]
    assert (type(built.rate), type(built.epochs)) == (float, int)


def test_a_constructed_wait_is_checked_too() -> None:
    wrong: Any = "long"
    with pytest.raises(ConfigError, match=r"^waits.call_s must be a number, not 'long'$"):
        Waits(call_s=wrong)


def test_a_constructed_run_equals_the_same_run_of_a_file() -> None:
    listed: Any = ["worker-1:0.2"]
    built = Config(rate=1, slow=listed)
    assert built == make_config({"rate": 1, "slow": listed})
    assert (type(built.rate), built.slow) == (float, ("worker-1:0.2",))


@pytest.mark.parametrize("seed", [1 << 64, "99999999999999999999999"])
def test_a_seed_beyond_the_numbers_of_the_cluster_map_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed must be a whole number of at most 64 bits"):
        make_config({"seed": seed})
    assert make_config({"seed": (1 << 64) - 1}).seed == (1 << 64) - 1
