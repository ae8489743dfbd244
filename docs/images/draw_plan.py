"""Draw the pictures of docs/plan.md: the network of the paper cut over two workers, both ways.

python docs/images/draw_plan.py        writes plan-vertical.svg and plan-layers.svg beside this file

Layer times are estimates here, so that the pictures are the same on every machine.
"""

from pathlib import Path

from adam_async.cli.plan.picture import draw_plan, svg
from adam_async.model import Network, named_model
from adam_async.model.partition.planner import layers_plan, vertical_plan

WORKERS = 2


def pictures() -> dict[str, str]:
    """Return the text of each picture by the name of its file."""
    network = Network(named_model("mnist-adam"))
    plans = {
        "plan-vertical.svg": vertical_plan(network, WORKERS, halo="exchange"),
        "plan-layers.svg": layers_plan(network, WORKERS),
    }
    return {name: svg(draw_plan(network, plan)) for name, plan in plans.items()}


if __name__ == "__main__":
    for name, text in pictures().items():
        Path(__file__).with_name(name).write_text(text)
