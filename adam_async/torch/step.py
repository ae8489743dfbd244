"""A PyTorch module as a training step, for `adam-async train --step`.

    def make_step():  # adam-async train --step package.module:make_step
        return TorchStep(Net, torch.nn.functional.cross_entropy)

Theory of operation. The arrays of the step are the parameters with gradients. Each compute thread takes a
copy of the module from a pool. On the CPU the copy's parameters use the values' memory, which is not copied.
Before the run `prepare` runs the module on two black images, which shows the factor rows of each linear layer
(`factors.py`). The run decides by bytes which weights travel as factors. The others get dense gradients from
autograd.

All other tensors in `state_dict()` are not arrays, because a run has one rule, which is wrong for them:

- Frozen parameters and constant buffers have the values of the module, which are equal in all processes.
- Running statistics of normalisation layers are means over batches of training images, under the values to
  evaluate ("precise" statistics, Wu and Johnson 2021). Averages over the workers would mix the values of many
  steps and replicas.
- Other buffers that training changes differ between the copies of the module. Evaluations and the saved model
  have their first values.

Letters: N images, C channels, H rows, W columns, K classes.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adam_async.errors import ConfigError, check_flags
from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.train_step import Batch, Gradients, Metrics, StepOutcome, TrainStep
from adam_async.torch.devices import to_device, to_host
from adam_async.torch.factors import LinearGradient
from adam_async.torch.module_copy import ALL_STREAMS, ModuleCopy, changed_in_place, drawing, seeded, tensor_of
from adam_async.torch.parameters import ModuleParameters

logger = logging.getLogger(__name__)

SAMPLE_IMAGES = 2048
"""Default number of training images for the running statistics."""

PROBED = 2
"""Number of images in the trial pass of `prepare`, 2 because normalisation needs more than one."""

CONSTANTS_SEED = 0
"""Seed of `prepare`'s trial pass, and of the constants of a module that a function makes."""

SAVED_TYPES = (
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
"""Types of buffers and frozen parameters that both a model file and NumPy can hold."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchBatch:
    """One group of images as tensors.

    Attributes:
        images: uint8 of shape (N, C, H, W). Read-only memory: do not change it in place.
        labels: int64 of shape (N,).
        dtype: Type of the module's parameters.
        epoch: Epoch of the group, from 1; 0 in an evaluation.
        number: Number of the group in its epoch, from 0.
    """

    images: Tensor
    labels: Tensor
    dtype: torch.dtype
    epoch: int
    number: int

    def scaled(self) -> Tensor:
        """Return the images as numbers from 0 to 1, shape (N, C, H, W)."""
        return self.images.to(self.dtype).div_(255)


def call_module(module: nn.Module, batch: TorchBatch) -> Any:
    """Return the module's output for the scaled images: the default `forward` of `TorchStep`."""
    return module(batch.scaled())


class TorchStep(TrainStep):
    """Trains a module by its loss.

    Args:
        module: A function that makes the module, or the module. The step seeds the random streams of PyTorch,
            Python and NumPy before it calls a function. So all processes make equal modules, and first values
            depend on the run's seed. If a module is given, its values are the first values of the run, and
            its frozen parameters and buffers must be equal in all processes.
        loss: Takes the output and the labels (N,), and returns the mean loss of the batch, a scalar tensor.
        metrics: Takes the output and the labels, and returns results by name. ``accuracy`` is required; the
            step adds it if the output has shape (N, K).
        forward: Takes the module and a `TorchBatch`, and returns the output, which may be any object, such as
            scores with targets. By default the module gets the scaled images.
        sample: Maximum number of training images for the running statistics, if the module has any.
        unused: Whether a batch may leave parameters without a gradient; their gradient is then zero.
        factors: Whether weights of linear layers may travel as factors. Set False if a layer of the module
            may get more rows per image than in the trial with black images.

    Raises:
        ConfigError: The module cannot be trained; the error names the tensor and the remedy.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        loss: Callable[[Any, Tensor], Tensor],
        metrics: Callable[[Any, Tensor], Mapping[str, float]] | None = None,
        *,
        forward: Callable[[nn.Module, TorchBatch], Any] = call_module,
        sample: int = SAMPLE_IMAGES,
        unused: bool = False,
        factors: bool = True,
    ) -> None:
        self._make = None if isinstance(module, nn.Module) else module
        self._loss, self._metrics, self._forward = loss, metrics, forward
        check_flags(unused=unused, factors=factors)
        self._unused = unused
        self._has_factors = factors
        # This module never trains: threads use copies.
        self._module = _copied(module) if isinstance(module, nn.Module) else self._made(CONSTANTS_SEED)
        specs = ModuleParameters(self._module).specs
        trained = _trained(self._module)
        if not trained:
            raise ConfigError(
                f"all {len(specs)} parameters of module {type(self._module).__name__} are frozen: call "
                "requires_grad_(True) on those to train"
            )
        self.arrays: Mapping[str, ArraySpec] = {name: specs[name] for name in trained}
        self._rows: dict[str, int] = {}
        """Rows of factors for each image, by the names of the weights with factors."""
        self.factors: Collection[str] = self._rows
        self.sample = sample if _statistics(self._module) else 0
        """Maximum number of training images for `derived`; 0 if the module has no running statistics."""
        self.constants = _constants(self._module, trained)
        """See `TrainStep.constants`."""
        self.deterministic = False
        """Whether a repetition of `step` gives equal bits; False before `prepare`.

        `prepare` sees the draws of its trial pass from the streams of PyTorch, Python (`random`) and NumPy
        (`numpy.random`). `prepare` sees no draws of the module's own generator objects, of other branches of
        `forward`, or of other sources, such as the clock: do not record a run of a step with such draws.
        """
        self._drawn: frozenset[str] = ALL_STREAMS
        """Random streams that `step` seeds."""
        first = next(iter(trained.values()))
        self._dtype, self._device = first.dtype, first.device
        self._prepared: tuple[int, int, int] | None = None
        self._preparing = Lock()
        self._training: deque[ModuleCopy] = deque()
        self._evaluating: deque[ModuleCopy] = deque()

    # --- before the run ------------------------------------------------------------------------

    def prepare(self, shape: tuple[int, int, int], classes: int) -> None:
        """Run the module once on two black images, to find the weights with factors.

        Raises:
            ConfigError: The module or its loss does not take such images, or a parameter has no gradient.
        """
        with self._preparing:
            if self._prepared == shape:
                return
            copy = self._new_copy(None if self._has_factors else ())
            self._drawn = self._try(copy, shape)
            found = copy.linear.take()
            self._rows = {name: rows for name, each in found.items() if (rows := _rows_of(each))}
            self.factors = self._rows
            for name, parameter in copy.parameters.items():
                if parameter.grad is not None:
                    _checked(name, parameter.grad)
                elif name not in found and not self._unused:
                    raise ConfigError(_without_gradient(name))
            changed = _changed(self._module, copy.module)
            if changed:
                logger.warning(
                    "training changes buffers %s of %s: each compute thread changes its own copies, and "
                    "evaluations and the saved model have the first values",
                    ", ".join(changed),
                    type(self._module).__name__,
                )
            # The streams of accelerators are not compared.
            self.deterministic = not self._drawn and not changed and self._device.type == "cpu"
            self._training.clear()
            self._prepared = shape

    @property
    def draws(self) -> frozenset[str]:
        """Random streams that a trial pass on the CPU has drawn from, after `prepare`."""
        return self._drawn if self._device.type == "cpu" else frozenset()

    def check_group(self, images: int) -> None:
        """Run both passes on this many black images: a batch normalisation needs several values per channel.

        Raises:
            ConfigError: The module fails on them.
        """
        assert self._prepared is not None
        self._probe(self._new_copy(()), images, self._prepared)

    def _try(self, copy: ModuleCopy, shape: tuple[int, int, int]) -> frozenset[str]:
        """Run both passes on black images; return the random streams that they may draw from.

        Raises:
            ConfigError: See `prepare`.
        """
        return self._probe(
            copy, PROBED, shape, "; give TorchStep a `forward` that converts the images for it"
        )

    def _probe(
        self, copy: ModuleCopy, images: int, shape: tuple[int, int, int], remedy: str = ""
    ) -> frozenset[str]:
        batch = Batch(np.zeros((images, *shape), np.uint8), np.zeros(images, np.int64))
        values, kept = self._values_of(self._module), self._values_of(self._module)
        with seeded(CONSTANTS_SEED) as drawn:
            try:
                copy.load(values)
                self._backward(copy, batch)
            except ConfigError:
                raise
            except Exception as error:  # any error of the user's module
                raise ConfigError(
                    f"module {type(self._module).__name__} fails on {images} images of shape {shape} "
                    f"with labels 0: {type(error).__name__}: {error}{remedy}"
                ) from error
            found = drawn() if self._device.type == "cpu" else drawn() | {"PyTorch"}
        for name, value in values.items():
            if not np.array_equal(value, kept[name]):  # changes by `parameter.data` are not counted
                raise ConfigError(changed_in_place(name))
        return found

    def initial(self, seed: int) -> Mapping[str, NDArray[Any]]:
        """Return the module's values. If a function makes the module, they depend on the seed."""
        return self._values_of(self._module if self._make is None else self._made(seed))

    # --- a batch -------------------------------------------------------------------------------

    def step(self, values: Mapping[str, NDArray[Any]], batch: Batch, out: Gradients) -> StepOutcome:
        """See `TrainStep.step`. If the module draws from a random stream of PyTorch, Python or NumPy, the
        call seeds this stream of the process with the group's epoch and number. Calls with draws from several
        threads run one after the other."""
        with self._acquired(self._training, self.factors) as copy:
            copy.linear.select(out.factored)
            copy.load(values)
            with drawing(self._drawn, _random_key(batch)):
                loss = self._backward(copy, batch)
            self._fill(copy, out, len(batch))
            # The loss is read last, so the copies of the gradients do not wait for it.
            return StepOutcome(loss.item(), weight=len(batch))

    def evaluate(self, values: Mapping[str, NDArray[Any]], batch: Batch) -> Metrics:
        """Return ``accuracy`` of the output, and the results of `metrics`.

        Args:
            values: The arrays, and the tensors of `derived`.
            batch: Images and labels.
        """
        with self._acquired(self._evaluating, ()) as copy, torch.no_grad():
            copy.module.eval()
            copy.load(values)
            tensors = self._tensors(batch)
            output = self._forward(copy.module, tensors)
            found = {} if self._metrics is None else dict(self._metrics(output, tensors.labels))
            if "accuracy" not in found and isinstance(output, Tensor) and output.ndim == 2:
                found["accuracy"] = (output.argmax(dim=1) == tensors.labels).double().mean()
            return {name: float(value) for name, value in found.items()}

    def derived(
        self, values: Mapping[str, NDArray[Any]], batches: Sequence[Batch]
    ) -> Mapping[str, NDArray[Any]]:
        """Return all other tensors of `state_dict()`: frozen ones, second names of tied ones, and buffers.

        Running statistics are means over the batches under these values; without batches, the module's.
        """
        with self._acquired(self._evaluating, ()) as copy, torch.no_grad():
            copy.load(values)
            layers = _statistics(copy.module)
            copy.module.eval()
            momenta = [layer.momentum for layer in layers]
            if batches:
                for layer in layers:
                    layer.reset_running_stats()
                    layer.momentum = None  # a plain mean over the batches
                    layer.train()
                for batch in batches:
                    if len(batch) > 1 or len(batches) == 1:  # one image has no variance
                        self._forward(copy.module, self._tensors(batch))
                for layer, momentum in zip(layers, momenta, strict=True):
                    layer.momentum = momentum
                    layer.eval()
            return {
                name: np.array(tensor.detach().cpu().numpy())
                for name, tensor in copy.module.state_dict().items()
                if name not in self.arrays
            }

    # --- inside --------------------------------------------------------------------------------

    def _made(self, seed: int) -> nn.Module:
        """Make the module with the random streams at this seed, and restore the streams."""
        assert self._make is not None
        with seeded(seed):
            module = self._make()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"the function of the module returned a {type(module).__name__}: return a torch.nn.Module"
            )
        return module

    def _values_of(self, module: nn.Module) -> dict[str, NDArray[Any]]:
        values = ModuleParameters(module).values()
        return {name: values[name] for name in self.arrays}

    def _new_copy(self, factors: Collection[str] | None) -> ModuleCopy:
        staged = self._device.type != "cpu"
        return ModuleCopy(_copied(self._module), self.arrays, factors, staged=staged)

    @contextmanager
    def _acquired(self, pool: deque[ModuleCopy], factors: Collection[str]) -> Iterator[ModuleCopy]:
        """Acquire a copy of the module from a pool for one thread, and release it."""
        try:
            copy = pool.pop()
        except IndexError:
            copy = self._new_copy(factors)
        yield copy
        # After an error the copy stays outside the pool: its hooks may be in an inconsistent state.
        copy.release()
        pool.append(copy)

    def _tensors(self, batch: Batch) -> TorchBatch:
        images, labels = (to_device(tensor_of(each), self._device) for each in (batch.images, batch.labels))
        return TorchBatch(images, labels, self._dtype, batch.epoch, batch.number)

    def _backward(self, copy: ModuleCopy, batch: Batch) -> Tensor:
        """Run both passes, and return the loss."""
        tensors = self._tensors(batch)
        loss = self._loss(self._forward(copy.module, tensors), tensors.labels)
        copy.check_unchanged()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss is a {what}: return a scalar tensor that depends on the parameters")
        loss.backward()
        return loss.detach()

    def _fill(self, copy: ModuleCopy, out: Gradients, images: int) -> None:
        """Write the gradients of a batch into `out`."""
        found = copy.linear.take()
        dense: dict[str, Tensor] = {}
        for name, parameter in copy.parameters.items():
            if name in found:
                self._check_factors(name, found[name], images)
            elif parameter.grad is not None:
                dense[name] = _checked(name, parameter.grad)
            elif not self._unused:
                raise ConfigError(_without_gradient(name))
            elif name in out.factored:
                rows, inputs = parameter.shape
                zeros = np.zeros((1, inputs + rows), self.arrays[name].dtype)
                out[name] = Factors(zeros[:, :inputs], zeros[:, inputs:])
            else:
                out[name][...] = 0
        pairs = [each for gradient in found.values() for each in (gradient.activations, gradient.errors)]
        arrays = iter(to_host([*dense.values(), *pairs]))
        for name, gradient in zip(dense, arrays, strict=False):
            out[name] = gradient
        for name in found:
            out[name] = Factors(next(arrays), next(arrays))

    def _check_factors(self, name: str, gradient: LinearGradient, images: int) -> None:
        if gradient.rest is not None:
            raise ConfigError(
                f"parameter {name!r} has a gradient outside its layer in this batch only: use it outside its "
                "layer in every batch, or in none"
            )
        if gradient.rows > images * self._rows[name]:
            raise ConfigError(
                f"the layer of parameter {name!r} got {gradient.rows} rows for {images} images, and in the "
                f"trial {self._rows[name]} for each: give TorchStep factors=False"
            )


def _copied(module: nn.Module) -> nn.Module:
    try:
        return deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"module {type(module).__name__} cannot be copied for a compute thread ({error!r}): keep no "
            "locks, files or computed tensors in its attributes"
        ) from error


def _rows_of(gradient: LinearGradient) -> int:
    """Return the number of factor rows per image in the trial; 0 if gradients must or should be dense."""
    rows, rest = divmod(gradient.rows, PROBED)
    inputs, outputs = gradient.activations.shape[1], gradient.errors.shape[1]
    fewer = gradient.rest is None and not rest and rows * (inputs + outputs) < inputs * outputs
    return rows if fewer else 0


def _checked(name: str, gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise ConfigError(
            f"parameter {name!r} has a gradient of layout {gradient.layout}, which servers cannot apply: use "
            "sparse=False where the gradient is made"
        )
    return gradient.detach().resolve_neg()  # NumPy does not know the views of conjugates


def _without_gradient(name: str) -> str:
    return (
        f"parameter {name!r} got no gradient: use it in the loss, freeze it with requires_grad_(False), or "
        "use TorchStep(..., unused=True) if only some batches need it; a forward pass must not replace "
        "parameters"
    )


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with gradients, each once, by first name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _statistics(module: nn.Module) -> list[_NormBase]:
    """Put a module into training mode, and return the layers whose running statistics then change."""
    module.train()
    return [
        part
        for part in module.modules()
        if isinstance(part, _NormBase) and part.track_running_stats and part.training
    ]


def _changed(before: nn.Module, module: nn.Module) -> list[str]:
    """Return the buffers that the passes of a copy changed, except running statistics."""
    kept = dict(before.named_buffers())
    known = {id(buffer) for layer in _statistics(module) for buffer in layer.buffers(recurse=False)}
    return [
        name
        for name, buffer in module.named_buffers()
        if id(buffer) not in known and not torch.equal(buffer, kept[name])
    ]


def _constants(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> dict[str, tuple[float, float]]:
    """Return the fingerprints of a module's tensors that are not arrays; see `TrainStep.constants`.

    A fingerprint is a tensor's norm and its product with irregular signs, which tells two tensors of one
    distribution apart.

    Raises:
        ConfigError: A tensor has no form in a model file; the error has its name.
    """
    skipped = {id(buffer) for layer in _statistics(module) for buffer in layer.buffers(recurse=False)}
    found: dict[str, tuple[float, float]] = {}
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for name, tensor in sorted(named.items()):
        if name in trained or id(tensor) in skipped:
            continue
        if tensor.dtype not in SAVED_TYPES or tensor.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name!r} has values of type {tensor.dtype} and layout {tensor.layout}, which a "
                "model file cannot hold: keep it as dense numbers, such as float32"
            )
        if tensor.requires_grad:
            continue  # another name of an array
        values = tensor.detach().cpu().double().numpy().ravel()
        signs = _signs(values.size)
        with np.errstate(all="ignore"):  # a mask may have infinite values
            known = np.nan_to_num(values, posinf=1e30, neginf=-1e30)
            found[name] = (float(np.linalg.norm(known)), float(known @ signs))
    for name, other in module.state_dict().items():
        if not isinstance(other, Tensor):
            raise ConfigError(
                f"{name!r} in state_dict() is a {type(other).__name__}, which a model file cannot hold: keep "
                "it out of get_extra_state, or make it a tensor"
            )
    return found


def _signs(count: int) -> NDArray[np.float64]:
    """Return irregular signs 1 and -1, the same everywhere: highest bits of multiples of the golden ratio."""
    bits = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(63)
    return 1.0 - 2.0 * bits.astype(np.float64)


def _random_key(batch: Batch) -> int:
    """Return the seed of a batch: a hash, because PyTorch's generator uses only 32 bits of a seed."""
    return int.from_bytes(blake2b(f"{batch.epoch} {batch.number}".encode(), digest_size=8).digest(), "big")
