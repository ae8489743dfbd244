"""Variables of the environment: which set an option, which are refused, which are left alone."""

import pytest

from adam_async.errors import ConfigError
from adam_async.run.config import PLAIN, from_environment
from adam_async.run.variables import check_variables, for_children


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ADAM_EPOCH", "ADAM_EPOCH sets no option; did you mean ADAM_EPOCHS?"),
        ("ADAM_epochs", "did you mean ADAM_EPOCHS?"),
        ("ADAM_IMAGE_PER_GROUP", "did you mean ADAM_IMAGES_PER_GROUP?"),
        ("ADAM_DATADIR", "did you mean ADAM_DATA_DIR?"),
        ("ADAM_WAITS", "waits are the table [waits] of a file"),
    ],
)
def test_a_variable_that_resembles_an_option_is_refused_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_environment({name: "5"})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "ADAM_DATA_DIR",
        "ADAM_TOKEN",
        "ADAM_TRACEBACK",
        "ADAM_VECTORS",
        "ADAM_TEST_EPOCHS",
        "ADAM_BENCH_LINK",
        "ADAM_HOME",
        "EPOCH",
    ],
)
def test_a_variable_of_another_purpose_is_left_alone(name: str) -> None:
    check_variables({name: "1"}, PLAIN)


def test_roles_of_a_cluster_have_no_options_and_no_token_in_their_environment() -> None:
    given = {"ADAM_THREADS": "4", "ADAM_TOKEN": "x", "ADAM_DATA_DIR": "/data", "PATH": "/bin"}
    assert for_children(given) == {"ADAM_DATA_DIR": "/data", "PATH": "/bin"}
