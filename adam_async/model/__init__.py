"""Pure: networks as numbers. Specs, layers, contexts, rules; no asyncio anywhere.

`network.py` builds the layers that a spec names. A caller loads a group of images into a context
(`context.py`). The network then runs its layers forward and backward on the context's arrays. A rule
(`rules/`) then turns each gradient into new values: at a parameter server, or at once in the memory that the
network reads (`in_place.py`).

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
    vectors.py                 sums of scaled vectors, and exactly rounded dot products
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
    from adam_async.errors import GradientMismatchError as GradientMismatchError
    from adam_async.errors import ModelError as ModelError
    from adam_async.errors import SpecError as SpecError
    from adam_async.model.context import Context as Context
    from adam_async.model.context import StepBuffers as StepBuffers
    from adam_async.model.context import StepOutcome as StepOutcome
    from adam_async.model.context import is_finite as is_finite
    from adam_async.model.in_place import InPlaceStep as InPlaceStep
    from adam_async.model.in_place import new_rule_state as new_rule_state
    from adam_async.model.in_place import train_step as train_step
    from adam_async.model.kernels import KERNELS as KERNELS
    from adam_async.model.layer import Array as Array
    from adam_async.model.layer import Factors as Factors
    from adam_async.model.layer import Layer as Layer
    from adam_async.model.layer import Loss as Loss
    from adam_async.model.layer import ParameterSpec as ParameterSpec
    from adam_async.model.layer import Slots as Slots
    from adam_async.model.layer import Weights as Weights
    from adam_async.model.layers import BUILTIN_LAYERS as BUILTIN_LAYERS
    from adam_async.model.named import NAMED_MODELS as NAMED_MODELS
    from adam_async.model.named import mlp as mlp
    from adam_async.model.named import named_model as named_model
    from adam_async.model.network import Network as Network
    from adam_async.model.rules import RULES as RULES
    from adam_async.model.rules import Adagrad as Adagrad
    from adam_async.model.rules import Adam as Adam
    from adam_async.model.rules import AdamW as AdamW
    from adam_async.model.rules import Rule as Rule
    from adam_async.model.rules import RuleState as RuleState
    from adam_async.model.rules import Sgd as Sgd
    from adam_async.model.rules import new_scratch as new_scratch
    from adam_async.model.rules import plain_step as plain_step
    from adam_async.model.spec import LayerSpec as LayerSpec
    from adam_async.model.spec import ModelSpec as ModelSpec

_HOMES = {
    "errors": ("GradientMismatchError", "ModelError", "SpecError"),
    "model.context": ("Context", "StepBuffers", "StepOutcome", "is_finite"),
    "model.in_place": ("InPlaceStep", "new_rule_state", "train_step"),
    "model.kernels": ("KERNELS",),
    "model.layer": ("Array", "Factors", "Layer", "Loss", "ParameterSpec", "Slots", "Weights"),
    "model.layers": ("BUILTIN_LAYERS",),
    "model.named": ("NAMED_MODELS", "mlp", "named_model"),
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
    "model.spec": ("LayerSpec", "ModelSpec"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    # The first use of a name loads its module, so reading text files loads no networks.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'adam_async.model' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"adam_async.{_HOME_OF[name]}"), name)
    return value
