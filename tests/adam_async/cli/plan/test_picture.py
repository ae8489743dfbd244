"""A picture shows every layer, every block and every way on which something crosses."""

import re
import struct
import sys
from pathlib import Path
from runpy import run_path
from xml.etree import ElementTree

import pytest

from adam_async.cli.plan.picture import Arrow, Box, Picture, Text, draw_plan, png, svg
from adam_async.errors import ConfigError
from adam_async.model import Network, named_model
from adam_async.model.named import NAMED_MODELS
from adam_async.model.partition.plan import Layout
from adam_async.model.partition.planner import layers_plan, vertical_plan

IMAGES = Path(__file__).resolve().parents[4] / "docs" / "images"


@pytest.fixture(scope="module")
def fonts() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    network = Network(named_model("digits"))
    png(draw_plan(network, vertical_plan(network, 2)))  # whatever fonts it opens stay open, for good


def words(picture: Picture) -> list[str]:
    return [shape.words for shape in picture.shapes if isinstance(shape, Text)]


def test_the_pictures_are_what_their_script_draws() -> None:
    drawn = run_path(str(IMAGES / "draw_plan.py"))["pictures"]()

    assert drawn == {name: (IMAGES / name).read_text() for name in ("plan-vertical.svg", "plan-layers.svg")}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_every_layer_worker_and_crossing_is_there_and_nothing_lies_outside(name: str, workers: int) -> None:
    network = Network(named_model(name))
    plan = vertical_plan(network, workers, halo="exchange")
    picture = draw_plan(network, plan)
    crossings = Layout(network.topology, network.input_shape, plan).crossings
    forward = [c for c in crossings if c.kind == "activation"]
    arrows = [shape for shape in picture.shapes if isinstance(shape, Arrow)]

    assert {layer.name for layer in network.layers} <= set(words(picture))
    assert [f"worker {worker}" for worker in range(workers)] == re.findall(
        r"worker \d", " ".join(words(picture)[2:])
    )
    assert len(arrows) == len(forward) + sum(c.kind == "gradient" for c in crossings)
    assert sum(arrow.back for arrow in arrows) == sum(c.kind == "error" for c in crossings)
    assert {f"{c.values:,}" for c in forward} <= set(words(picture))
    for shape in picture.shapes:
        x = min(shape.x1, shape.x2) if isinstance(shape, Arrow) else shape.x
        assert 0 <= x <= picture.width
        assert 0 <= shape.y <= picture.height
        if isinstance(shape, Box):
            assert shape.x + shape.width <= picture.width


def test_arrows_go_from_who_sends_to_who_gets() -> None:
    network = Network(named_model("mnist-adam"))
    (values,) = [s for s in draw_plan(network, layers_plan(network, 2)).shapes if isinstance(s, Arrow)]
    *_, scores, sums = [
        s for s in draw_plan(network, vertical_plan(network, 2)).shapes if isinstance(s, Arrow)
    ]

    assert values.x1 < values.x2
    assert scores.x1 > scores.x2  # worker 0 has the loss
    assert sums.x1 < sums.x2
    assert not sums.back


def test_a_block_is_named_and_shown_as_the_part_of_the_layer_that_it_is() -> None:
    network = Network(named_model("mnist-adam"))
    picture = draw_plan(network, vertical_plan(network, 2, halo="recompute"))
    named = words(picture)

    assert "rows 0 to 15 of 24" in named
    assert "rows 8 to 23 of 24" in named
    assert named.count("all 320 features") == 2
    assert named.count("the loss") == 1
    assert "orange: some rows on several workers" in named[1]
    assert "orange" not in words(draw_plan(network, vertical_plan(network, 2, halo="exchange")))[1]


def test_an_svg_is_well_formed_whatever_a_model_is_called() -> None:
    spec = named_model("digits")
    network = Network(type(spec)(name='<&"', input_shape=spec.input_shape, layers=spec.layers))
    root = ElementTree.fromstring(svg(draw_plan(network, vertical_plan(network, 2))))

    assert root.tag.endswith("svg")
    assert root.attrib["aria-label"] == '<&", plan vertical over 2 workers'


@pytest.mark.slow  # fonts are looked for once
def test_a_png_is_twice_as_many_dots_as_the_svg_has_points(fonts: None) -> None:
    network = Network(named_model("digits"))
    picture = draw_plan(network, vertical_plan(network, 2))
    data = png(picture)

    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (2 * picture.width, 2 * picture.height)
    assert len(data) > 20_000


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    network = Network(named_model("digits"))

    with pytest.raises(ConfigError, match=r"extra `plot`: pip install 'adam-async\[plot\]'; or name a .svg"):
        png(draw_plan(network, vertical_plan(network, 2)))
