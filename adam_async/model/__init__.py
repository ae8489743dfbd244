"""Pure: networks as numbers. Specs, layers, contexts, rules; no asyncio anywhere."""

from adam_async.errors import GradientMismatchError, ModelError, SpecError
from adam_async.model.context import Context
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
    make_rule,
    new_scratch,
    plain_step,
)
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.model.step import StepBuffers, StepOutcome, is_finite

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
    "make_rule",
    "mlp",
    "named_model",
    "new_rule_state",
    "new_scratch",
    "plain_step",
    "train_step",
]
