"""Pure: networks as numbers. Specs, layers, contexts, rules; no asyncio anywhere.

`network.py` builds the layers that a spec names. A caller loads a group of images into a context
(`context.py`), and the network runs its layers forward and backward on the arrays there. A rule (`rules/`)
then turns each gradient into new values: at a parameter server, or at once in the memory that the network
reads (`in_place.py`).

    network.py                 start here: forward, backward, gradients, factors, start values, scores
    spec.py, named.py          the specification of a network, also in TOML; the models with a name
    toml_text.py               TOML text of users, with bounds before and after it is parsed
    layer.py                   the interface of a layer: forward, backward, delta, factors; cut layers
    layers/                    built-in layers in NumPy: convolution, dense, pooling, dropout, losses, others
    topology.py                the graph of the layers, checked; layers that share memory
    context.py                 a training context: activations, error gradients and scratch of one group; the
                               buffers and outcome of a step
Updates:
    rules/                     update rules: SGD, momentum, Adagrad, Adam, AdamW; their constants and state
    rule_batches.py            one rule on several gradients of a server's shards, block by block
    in_place.py                steps in place without a lock (Hogwild)
Compiled kernels, and models cut over workers:
    kernels.py                 the choice between NumPy's kernels and compiled ones
    fast/                      compiled kernels of layers and rules (Numba, LLVM); many kernels in one call
    partition/                 a model cut over the workers of a replica: plans, predicted cost, parts
Checks and measures:
    keyed_random.py            random values that depend only on seed, purpose and keys (Philox)
    gradcheck.py               checks of gradients by finite differences, for layers and networks
    working_set.py             memory that training on a group uses, and the cache with room for it
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adam_async.errors import GradientMismatchError, ModelError, SpecError
    from adam_async.model.context import Context, StepBuffers, StepOutcome, is_finite
    from adam_async.model.in_place import InPlaceStep, new_rule_state, train_step
    from adam_async.model.kernels import KERNELS
    from adam_async.model.layer import Array, Factors, Layer, Loss, ParameterSpec, Slots, Weights
    from adam_async.model.layers import BUILTIN_LAYERS
    from adam_async.model.named import NAMED_MODELS, mlp, named_model
    from adam_async.model.network import Network
    from adam_async.model.rules import (
        RULES,
        Adagrad,
        Adam,
        AdamW,
        Rule,
        RuleState,
        Sgd,
        new_scratch,
        plain_step,
    )
    from adam_async.model.spec import LayerSpec, ModelSpec

__all__ = [
    "BUILTIN_LAYERS",
    "KERNELS",
    "NAMED_MODELS",
    "RULES",
    "Adagrad",
    "Adam",
    "AdamW",
    "Array",
    "Context",
    "Factors",
    "GradientMismatchError",
    "InPlaceStep",
    "Layer",
    "LayerSpec",
    "Loss",
    "ModelError",
    "ModelSpec",
    "Network",
    "ParameterSpec",
    "Rule",
    "RuleState",
    "Sgd",
    "Slots",
    "SpecError",
    "StepBuffers",
    "StepOutcome",
    "Weights",
    "is_finite",
    "mlp",
    "named_model",
    "new_rule_state",
    "new_scratch",
    "plain_step",
    "train_step",
]

_HOMES = {
    "errors": (
        "GradientMismatchError",
        "ModelError",
        "SpecError",
    ),
    "model.context": ("Context", "StepBuffers", "StepOutcome", "is_finite"),
    "model.in_place": (
        "InPlaceStep",
        "new_rule_state",
        "train_step",
    ),
    "model.kernels": ("KERNELS",),
    "model.layer": (
        "Array",
        "Factors",
        "Layer",
        "Loss",
        "ParameterSpec",
        "Slots",
        "Weights",
    ),
    "model.layers": ("BUILTIN_LAYERS",),
    "model.named": (
        "NAMED_MODELS",
        "mlp",
        "named_model",
    ),
    "model.network": ("Network",),
    "model.rules": (
        "RULES",
        "Adagrad",
        "Adam",
        "AdamW",
        "Rule",
        "RuleState",
        "Sgd",
        "new_scratch",
        "plain_step",
    ),
    "model.spec": (
        "LayerSpec",
        "ModelSpec",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # The first use of a name loads its module, so that text files are read without networks.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'adam_async.model' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"adam_async.{_HOME_OF[name]}"), name)
    return value
