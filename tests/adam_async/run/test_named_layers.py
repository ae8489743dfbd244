"""Layers that are named by where they are."""

import pytest

from adam_async.errors import ConfigError
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.run.named_layers import import_layers
from tests.adam_async.runs import Trap


def test_a_named_layer_is_imported_beside_those_of_the_package():
    found = import_layers({"trap": "tests.adam_async.runs:Trap"})
    assert found == {**BUILTIN_LAYERS, "trap": Trap}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.adam_async.runs:Nothing", "layer 'mine'.*has no 'Nothing'"),
        ("no_such_module_at_all:Mine", "layer 'mine'.*no module"),
        ("tests.adam_async.runs:tiny_dataset", "layer 'mine'.*derives from Layer"),
    ],
)
def test_what_is_no_layer_is_refused_by_its_kind(name, said):
    with pytest.raises(ConfigError, match=said):
        import_layers({"mine": name})
