"""The table of layers in the documents equals that of the code."""

import re
from pathlib import Path

import pytest

from adam_async.model import BUILTIN_LAYERS, NAMED_MODELS, Network, named_model

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "reference" / "layers.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
LAYERS = {name: row for row in ROWS if len(row) == 6 for name in re.findall(r"`(\w+)`", row[0])}


def written(default):
    """Write a default as the table does: empty if the option is required."""
    if default is None:
        return ""
    return " none" if default == () else f" {default if default != 1e-4 else '0.0001'}"


@pytest.mark.parametrize("kind", BUILTIN_LAYERS)
def test_every_layer_has_a_row_that_names_its_options_and_their_defaults(kind):
    text = LAYERS["conv2d" if LAYERS[kind][1] == "as `conv2d`" else kind][1]
    options = BUILTIN_LAYERS[kind].OPTIONS

    assert re.findall(r"`(\w+)`", text) == list(options)
    for name, default in options.items():
        assert re.search(rf"`{name}`{written(default)}(,|:| \(|$)", text), f"{name} {default}"


@pytest.mark.parametrize("kind", BUILTIN_LAYERS)
def test_every_layer_has_a_row_with_its_cut(kind):
    (cut,) = re.findall(rf"^\| (\w+) \|[^|]*`{kind}`", TEXT, re.MULTILINE)

    assert cut == BUILTIN_LAYERS[kind].CUT


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_every_named_model_has_a_row_with_its_counts(name):
    network = Network(named_model(name))
    (row,) = [row for row in ROWS if row[0] == f"`{name}`"]

    assert row[1] == "x".join(map(str, network.spec.input_shape))
    assert [int(count.replace(",", "")) for count in row[3:]] == [
        network.num_parameters,
        network.multiply_adds,
    ]
