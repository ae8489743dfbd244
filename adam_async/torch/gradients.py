"""A module's parameter gradients in one step, checked; sums over steps; pushes in the backward pass.

With `overlap=True` hooks on the parameters collect gradients, and push them together. In the first step the
optimizer's `step` pushes all gradients. From the second step on a hook pushes the collected gradients as soon
as they have `BUCKET_BYTES`. `step` then checks that the program has not changed a pushed gradient, and pushes
the rest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adam_async.errors import ConfigError, StoreError
from adam_async.run.arrays import Factors
from adam_async.store.arrays import Gradient, fault_of_values
from adam_async.torch.factors import LinearGradient


class Slot:
    """One parameter of an optimizer, with its memory's address.

    Args:
        name: Name of its array.
        parameter: The parameter.
        group: Index of its parameter group.

    Attributes:
        view: The parameter's own memory as an array, if it is on the CPU; else None.
        is_direct: Whether a pull may fill `view`.
    """

    __slots__ = (
        "device", "dtype", "group", "is_direct", "name", "parameter", "pointer", "shape", "strides", "view"
    )  # fmt: skip

    def __init__(self, name: str, parameter: nn.Parameter, group: int) -> None:
        self.name = name
        self.parameter = parameter
        self.group = group
        self.shape = parameter.shape
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.view: NDArray[Any] | None
        self.look()

    def look(self) -> None:
        """Read the address of the parameter's memory, at first and after the memory has moved.

        Raises:
            StoreError: The parameter has another shape or type, or is on another device.
        """
        parameter = self.parameter
        if parameter.device != self.device:
            raise StoreError(
                f"parameter {self.name!r} moved from {self.device} to {parameter.device}: move the module "
                "before you make its RemoteOptimizer"
            )
        if parameter.dtype != self.dtype:
            raise StoreError(
                f"parameter {self.name!r} changed from {self.dtype} to {parameter.dtype}: convert the module "
                "first, open a store with its arrays, and make its RemoteOptimizer then"
            )
        if parameter.shape != self.shape:
            raise StoreError(
                f"parameter {self.name!r} has shape {tuple(parameter.shape)}, and its array in the store "
                f"{tuple(self.shape)}, which cannot change: open another store for the changed module, and "
                "make a new optimizer over it"
            )
        self.pointer, self.strides = parameter.data_ptr(), parameter.stride()
        is_near = parameter.device.type == "cpu"
        self.view = parameter.detach().numpy() if is_near else None
        self.is_direct = self.view is not None and self.view.flags.c_contiguous

    def gradient(self) -> Tensor | None:
        """Return the gradient, detached; None without a gradient.

        Raises:
            StoreError: The gradient is sparse, or the parameter has another shape.
        """
        parameter = self.parameter
        if (
            parameter.data_ptr() != self.pointer
            or parameter.shape != self.shape
            or parameter.stride() != self.strides
        ):
            self.look()
        gradient: Tensor | None = parameter.grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            raise StoreError(
                f"parameter {self.name!r} has a sparse gradient ({gradient.layout}), which a store cannot "
                "apply: make its layer with sparse=False, or call .to_dense() on the gradient"
            )
        if gradient.is_neg():  # a view, such as of a conjugate, which NumPy does not know
            gradient = parameter.grad = gradient.resolve_neg()
        return gradient.detach() if gradient.requires_grad else gradient


Found: TypeAlias = Tensor | LinearGradient
"""Gradient of one parameter in one step: dense, or as two factors."""


def collect(
    slots: Iterable[Slot], captured: Mapping[str, LinearGradient], *, allow_unused: bool
) -> dict[str, Found]:
    """Return the gradients of the parameters that are not frozen, by name.

    Args:
        slots: The parameters.
        captured: Gradients as factors; those that are not `LinearGradient.fewer` are made dense.
        allow_unused: Whether a parameter may have no gradient.

    Raises:
        StoreError: A parameter has no gradient although it is not frozen; or see `Slot.gradient`.
    """
    found: dict[str, Found] = {}
    for slot in slots:
        gradient: Found | None = slot.gradient()
        if (factors := captured.get(slot.name)) is not None:
            gradient = factors if factors.fewer else factors.dense()
        if gradient is not None and slot.parameter.requires_grad:
            found[slot.name] = gradient
        elif slot.parameter.requires_grad and not allow_unused:
            raise StoreError(
                f"parameter {slot.name!r} has no gradient: no loss.backward() reached it since zero_grad(). "
                "Freeze it with requires_grad_(False) if the model does not use it, or give RemoteOptimizer "
                "allow_unused=True if it is used in some steps only"
            )
    return found


class Sums:
    """Sums of gradients over several steps, on the devices of the gradients."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._present: dict[str, None] = {}
        self.steps = 0
        """Number of steps in the sums."""

    def add(self, gradients: Mapping[str, Any]) -> None:
        """Add the gradients of one step, which are dense."""
        first = [name for name in gradients if name not in self._present]
        later = [name for name in gradients if name in self._present]
        for name in first:
            memory = self._memory.get(name)
            if memory is None or memory.device != gradients[name].device:
                self._memory[name] = torch.empty_like(gradients[name], memory_format=torch.contiguous_format)
        if first:
            torch._foreach_copy_([self._memory[name] for name in first], [gradients[name] for name in first])
        if later:
            torch._foreach_add_([self._memory[name] for name in later], [gradients[name] for name in later])
        self._present.update(dict.fromkeys(first))
        self.steps += 1

    def take(self, *, mean: bool) -> dict[str, Tensor]:
        """Return the sums, or the means over the steps; the next `add` begins new sums in their memory."""
        found = {name: self._memory[name] for name in self._present}
        if mean and found:
            torch._foreach_div_(list(found.values()), float(self.steps))
        self._present, self.steps = {}, 0
        return found

    def drop(self, names: Iterable[str]) -> None:
        """Forget the gradients of some parameters."""
        for name in names:
            self._present.pop(name, None)

    def release(self) -> None:
        """Use other memory for the next sums, because a push may still read the current sums."""
        self._memory = {name: memory for name, memory in self._memory.items() if name in self._present}


def copied(factors: Factors) -> Factors:
    """Return factors in separate memory."""
    return Factors(np.array(factors.activations), np.array(factors.errors))


def fault_of(gradients: Mapping[str, Gradient]) -> str:
    """Return an error text for the first gradient that is not finite; empty if all are finite."""
    cure = (
        "the loss of this step is not finite, or its backward pass overflowed. Lower the rate, clip "
        "gradients, or skip steps whose loss is not finite"
    )
    for name, gradient in gradients.items():
        parts: tuple[Any, ...] = (gradient,)
        if isinstance(gradient, Factors):
            parts = gradient.activations, gradient.errors
        for part in parts:
            flat = np.asarray(part).reshape(-1)
            if fault := fault_of_values(flat, f"the gradient of parameter {name!r}", cure):
                return fault
    return ""


BUCKET_BYTES = 1 << 20
"""Minimum size of the gradients that a hook pushes together, in bytes."""


class Overlap:
    """The hooks of an optimizer with `overlap=True`, from when they are registered until `close`.

    Args:
        push: Pushes the gradients of some parameters.

    Attributes:
        is_ahead: Whether hooks push; if not, `rest` returns all gradients.
    """

    def __init__(self, push: Callable[[Sequence[Slot]], None]) -> None:
        self._push = push
        self.is_ahead = False
        self._bucket: list[Slot] = []
        self._bytes = 0
        self._pushed: dict[str, tuple[Tensor, int]] = {}
        """Gradient of each parameter in this backward pass, and its version at the call of the hook."""
        self._removals: list[Callable[[], None]] = []

    def watch(self, slot: Slot) -> None:
        """Collect a parameter's gradient in each later backward pass, unless the parameter is frozen."""
        if slot.parameter.requires_grad:
            handle = slot.parameter.register_post_accumulate_grad_hook(partial(self._ready, slot))
            self._removals.append(handle.remove)

    def _ready(self, slot: Slot, parameter: nn.Parameter) -> None:
        gradient = slot.gradient()
        if gradient is None:
            return
        if slot.name in self._pushed:
            raise ConfigError(
                f"parameter {slot.name!r} gets a second gradient before step(): overlap=True pushes each "
                "gradient during its backward pass. Call step() after each backward(), or use overlap=False, "
                "with push_every=N to sum over N steps"
            )
        self._pushed[slot.name] = (gradient, gradient._version)
        self._bucket.append(slot)
        self._bytes += gradient.numel() * gradient.element_size()
        if self._bytes >= BUCKET_BYTES and self.is_ahead:
            self._push(self._take())

    def _take(self) -> list[Slot]:
        bucket, self._bucket, self._bytes = self._bucket, [], 0
        return bucket

    def rest(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients that are not pushed yet, and begin the next step.

        Raises:
            StoreError: A gradient was changed or replaced after the call of its hook.
        """
        pushed, self._pushed = self._pushed, {}
        waiting = {slot.name for slot in self._take()}
        for name, (gradient, version) in pushed.items():
            now = gradients.get(name)
            # With `create_graph=True` each look at a gradient makes another tensor over its memory.
            if now is None or not now.is_set_to(gradient) or now._version != version:
                raise StoreError(
                    f"the gradient of parameter {name!r} was changed after backward(), but overlap=True had "
                    "pushed it before: use overlap=False to clip, scale or replace gradients"
                )
        return {
            name: gradient for name, gradient in gradients.items() if name in waiting or name not in pushed
        }

    def abandon(self) -> None:
        """Forget a failed step's gradients, so that the next backward pass begins another step."""
        self._take()
        self._pushed = {}

    def close(self) -> None:
        """Remove the hooks."""
        for remove in self._removals:
            remove()
        self._removals.clear()
