"""Pushes during the backward pass: hooks on the parameters collect gradients, and push them together.

In the first step the optimizer's `step` pushes all gradients. From the second step on a hook pushes the
collected gradients as soon as they have `BUCKET_BYTES`. `step` then checks that the program has not changed a
pushed gradient, and pushes the rest.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from adam_async.errors import ConfigError, StoreError
from adam_async.torch.gradients import Slot

BUCKET_BYTES = 1 << 20
"""Minimum size of the gradients that a hook pushes together, in bytes."""


class Overlap:
    """The hooks of an optimizer with `overlap=True`, from their registration until `close`.

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
        """Forget the gradients of a failed step, so that the next backward pass begins another step."""
        self._take()
        self._pushed = {}

    def close(self) -> None:
        """Remove the hooks."""
        for remove in self._removals:
            remove()
        self._removals.clear()
