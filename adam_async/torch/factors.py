"""The weight gradients of `nn.Linear` as two factors, captured in a forward and a backward pass.

A linear layer computes y = x W^T + b, so the gradient of W is errors^T activations. The activations are the
layer's inputs x, and the errors the gradients of its outputs y (Adam, section 3.5.2). K rows of factors need
fewer bytes than the gradient if K (R + I) < R I.

Theory of operation. Hooks around each layer's forward pass make its weight a constant for the layer's own
arithmetic, so autograd never computes the weight's gradient there. An identity function (`_Tap`) follows the
layer: its forward pass stores the inputs, and its backward pass the errors. All other uses of the weight,
such as a penalty in the loss, still make a gradient in `weight.grad`, which `take` returns as
`LinearGradient.rest`. A capture without such a gradient puts zeros into `weight.grad`, and marks one of them
with `MARK`. So each way to remove gradients, such as `model.zero_grad()`, shows in `weight.grad`, and the
capture forgets its factors.

Subclasses of `nn.Linear`, parametrised weights and weights that two layers share keep dense gradients.

Letters: K rows over all calls of a layer, I inputs, R outputs.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adam_async.errors import ConfigError, StoreError
from adam_async.run.arrays import Factors
from adam_async.torch.devices import to_host

_WITHOUT = "use factors=False"

MARK = 1e-30
"""Value that replaces zero in the first element of `weight.grad` while a layer has factors. `zero_` removes
the mark, and a scaled mark is an error."""

LEAST_REST = 1e-20
"""Least magnitude of a gradient from other uses of a weight; a scaled mark is smaller."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearGradient:
    """The gradient of a layer's weight (R, I) as two factors: errors^T activations.

    Attributes:
        activations: (K, I), on the device of the layer.
        errors: (K, R), on the device of the layer.
        rest: (R, I), the gradient of uses of the weight outside its layer; None if there are none.
    """

    activations: Tensor
    errors: Tensor
    rest: Tensor | None = None

    @property
    def rows(self) -> int:
        """K, the number of rows in both factors."""
        return len(self.activations)

    @property
    def fewer(self) -> bool:
        """Whether the factors are the whole gradient, and have fewer values than the dense one."""
        inputs, outputs = self.activations.shape[1], self.errors.shape[1]
        return self.rest is None and self.rows * (inputs + outputs) < inputs * outputs

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the whole gradient (R, I), in `out` if that is given."""
        found = torch.matmul(self.errors.T, self.activations, out=out)
        return found if self.rest is None else found.add_(self.rest)

    def factors(self) -> Factors:
        """Return the factors as numpy arrays, which share the memory of tensors on the CPU.

        Raises:
            ConfigError: The factors are not the whole gradient.
        """
        if self.rest is not None:
            raise ConfigError("the weight has a gradient outside its layer: use `dense`")
        return Factors(*to_host([self.activations, self.errors]))


def linear_weights(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers whose weight gradients have factors, by weight name.

    Each layer is an `nn.Linear` and no subclass. The layer's weight takes gradients, is a parameter of this
    layer only, and has no parametrisation.
    """
    owners: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {
        f"{name}.weight".lstrip("."): part
        for name, part in module.named_modules()
        if type(part) is nn.Linear
        and isinstance(weight := part._parameters.get("weight"), nn.Parameter)
        and weight.requires_grad
        and weight.numel()
        and owners[id(weight)] == 1
        and "forward" not in vars(part)  # a custom forward pass may do anything with the weight
    }


class LinearFactors:
    """Captures the factors of a module's linear layers, from the constructor's end until `close`.

    One thread at a time may run the module. `take` returns the rows of all passes since the last call.

    Args:
        module: The module, whose layers get hooks.
        names: Names of weights to capture, from `linear_weights`; None: all of them.
        on_captured: Called with a weight's name in the backward pass, after each capture. A capture
            accumulates no gradient, so PyTorch calls no hook of `register_post_accumulate_grad_hook` for it.

    Raises:
        ConfigError: A name is no weight of `linear_weights`.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Collection[str] | None = None,
        *,
        on_captured: Callable[[str], None] | None = None,
    ) -> None:
        layers = linear_weights(module)
        if unknown := [name for name in names or () if name not in layers]:
            raise ConfigError(
                f"parameter {unknown[0]!r} is not the weight of a plain nn.Linear with gradients, used by "
                f"one layer: leave it out of the factors; {len(layers)} other weights can have factors"
            )
        self._captures = {
            name: _Capture(name, layer, on_captured)
            for name, layer in layers.items()
            if names is None or name in names
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the captured weights, in the order of the module."""
        return tuple(self._captures)

    def select(self, names: Collection[str]) -> None:
        """From now on capture only these weights; the others get dense gradients."""
        for name, capture in self._captures.items():
            capture.selected = name in names

    def take(self, *, spend: bool = False) -> dict[str, LinearGradient]:
        """Return the gradients since the last call by the names of their weights, and forget them.

        With `spend` the program has to remove the gradients, as by `zero_grad`, before the next backward
        pass or call: PyTorch would add to these gradients, or use them again, and their factors are gone.

        A weight without a capture is absent; `weight.grad` is then its whole gradient, or None. Otherwise
        `weight.grad` moves into `LinearGradient.rest`. Activations may be the module's own inputs: change
        these in place only after the gradients are used.

        Raises:
            StoreError: The program has scaled a captured gradient, or has not removed a spent one.
        """
        found = ((name, capture.take(spend=spend)) for name, capture in self._captures.items())
        return {name: gradient for name, gradient in found if gradient is not None}

    def clear(self) -> None:
        """Forget the captured factors, as `zero_grad` forgets gradients."""
        for capture in self._captures.values():
            capture.forget()

    def close(self) -> None:
        """Remove the hooks; weights get dense gradients again."""
        for capture in self._captures.values():
            capture.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Capture:
    """One layer's hooks, and its captured factors."""

    def __init__(self, name: str, layer: nn.Linear, on_captured: Callable[[str], None] | None) -> None:
        self.name = name
        self.layer = layer
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Activations (rows, I) and errors (rows, R) of each call."""
        self.selected = True
        """Whether passes are captured."""
        self._on_captured = on_captured
        self._paused = False
        self._zeros: Tensor | None = None
        """Marked zeros for `weight.grad`, used again while nothing changes them in place."""
        self._zeros_version = 0
        self._marked: Tensor | None = None
        """`weight.grad` at the first capture since the last take."""
        self._version = 0
        """PyTorch's version counter of `_marked`, which counts changes in place."""
        self._has_rest = False
        """Whether `_marked` had a gradient before its mark."""
        self._is_spent = False
        """Whether `_marked` stands for a gradient that `take` has returned."""
        self._handles: list[RemovableHandle] = [
            layer.register_forward_pre_hook(self._before),
            layer.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        weight = self.layer.weight
        # Without gradients, and for a weight frozen after the capture began, the layer runs as usual.
        if self.selected and torch.is_grad_enabled() and weight.requires_grad:
            weight.requires_grad_(False)
            self._paused = True

    def _after(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        if not self._paused:
            return output
        self._paused = False
        weight = self.layer.weight.requires_grad_(True)
        if output is None:  # the forward pass raised
            return None
        # A call by keyword has no positional inputs, so its activations are unknown.
        if len(inputs) != 1:
            raise ConfigError(
                f"the layer of parameter {self.name!r} was called with {len(inputs)} positional inputs: call "
                f"it as layer(x), or {_WITHOUT}"
            )
        found: Tensor = _Tap.apply(output, weight, inputs[0].detach(), self)
        return found

    def captured(self, activations: Tensor, errors: Tensor) -> None:
        """Store the factors of one call, whose tensors may have any number of leading axes."""
        weight = self.layer.weight
        self._forget_removed()
        if not self.pairs:
            self._mark()
        rows = activations.reshape(-1, weight.shape[1]).to(weight.dtype)
        self.pairs.append((rows, errors.detach().reshape(-1, weight.shape[0]).to(weight.dtype)))
        if self._on_captured is not None:
            self._on_captured(self.name)

    def _mark(self) -> None:
        """Mark `weight.grad`, with zeros in place of None."""
        weight, zeros = self.layer.weight, self._zeros
        self._has_rest = weight.grad is not None and weight.grad is not zeros
        if not self._has_rest:
            if zeros is None or zeros._version != self._zeros_version or zeros.device != weight.device:
                zeros = self._zeros = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            zeros[0, 0] = MARK  # again, because `GradScaler` may have scaled it
            self._zeros_version = zeros._version
            weight.grad = zeros
        else:
            first = weight.grad[0, 0]
            first.copy_(torch.where(first == 0, MARK, first))
        self._marked, self._version = weight.grad, weight.grad._version

    def _forget_removed(self) -> None:
        """Forget the factors if the program has removed `weight.grad` or set it to zero since the capture."""
        marked, now = self._marked, self.layer.weight.grad
        if marked is None or now is None or (now._version != self._version and not now[0, 0]):
            self.forget()
        elif now is not marked and (self._has_rest or now.abs().max() > LEAST_REST):
            self.forget()  # a gradient of other uses, after the removal of the marked one
        if self._is_spent and self.layer.weight.requires_grad:
            raise StoreError(
                f"the gradient of parameter {self.name!r} was not removed after the last step(), which "
                f"has used its factors: call zero_grad() before the next backward() or step(), or {_WITHOUT}"
            )

    def forget(self) -> None:
        """Forget the factors and their return."""
        self.pairs.clear()
        self._is_spent = False

    def take(self, *, spend: bool) -> LinearGradient | None:
        """Return the gradient of all calls since the last take, and forget them; None without a call."""
        self._forget_removed()
        if not self.pairs:
            return None
        pairs, self.pairs = self.pairs, []
        rest, self.layer.weight.grad = self.layer.weight.grad, None
        # PyTorch does not count the changes of `GradScaler`, so the mark itself is read.
        is_marked = bool(rest[0, 0] == MARK)
        is_same = is_marked and rest._version == self._version
        if not self._has_rest and (is_same or rest.abs().max() < LEAST_REST):
            if not is_marked:
                raise StoreError(
                    f"the gradient of parameter {self.name!r} was changed after backward(), and its factors "
                    "were not: use factors=False to clip, scale, unscale or replace gradients"
                )
            rest = None
        if spend:
            self._mark()
            self._is_spent = True
        if len(pairs) == 1:
            return LinearGradient(*pairs[0], rest)
        activations, errors = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return LinearGradient(activations, errors, rest)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.pairs.clear()


class _Tap(torch.autograd.Function):
    """Returns a layer's outputs unchanged; its backward pass gives inputs and errors to the capture."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor, inputs: Tensor, capture: _Capture) -> Tensor:
        # An output that counts as changed in place is not a view, so later layers may change it in place.
        ctx.mark_dirty(output)
        ctx.save_for_backward(inputs)
        ctx.capture = capture
        return output

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Give the layer's inputs and errors to the capture, and pass the errors on.

        Raises:
            ConfigError: The caller asks for gradients of gradients.
        """
        capture: _Capture = ctx.capture
        if torch.is_grad_enabled():
            raise ConfigError(
                f"parameter {capture.name!r} has no factors for gradients of gradients (create_graph=True): "
                f"{_WITHOUT}"
            )
        try:
            (inputs,) = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise ConfigError(
                f"the inputs of the layer of parameter {capture.name!r} were changed in place before the "
                f"backward pass: make the change without 'inplace', or {_WITHOUT}"
            ) from error
        to_grad = _is_for_grad(ctx.next_functions[1][0])
        if to_grad:
            capture.captured(inputs, errors)
        if to_grad is not None:
            return errors, None, None, None
        rows = errors.reshape(-1, errors.shape[-1])
        return errors, rows.T @ inputs.reshape(len(rows), -1).to(rows.dtype), None, None


def _is_for_grad(leaf: Any) -> bool | None:
    """Return whether the backward pass in progress adds to the `grad` of a leaf, given its node.

    `autograd.grad` and `backward(inputs=...)` add to the `grad` of no leaf, or of some. None if
    `autograd.grad` returns the leaf's gradient to the program.
    """
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # PyTorch's answer for a leaf that `autograd.grad` was given
        return None
