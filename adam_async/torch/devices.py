"""Staging memory on the CPU between tensors and a store's arrays, and the copies to and from a GPU.

A `Lane` is staging memory for the arrays of one device and type; `Lanes` are those of a module, and
`Staging` those of one exchange. On CUDA the memory on the CPU is pinned: `fetch` copies values to the GPU on
a stream of its own while the program computes, and `land` copies them into the parameters within the GPU. On
MPS the copies block. On the CPU both sides of a lane are the same memory, so the same code runs without a
GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Alignment of the arrays of a lane, in values: 64 bytes of float32."""


class Lane:
    """Staging memory for arrays of one device and type, on the CPU and on the device.

    Args:
        tensors: Tensors by name, of one device and type; the arrays get their shapes.
        stream: Stream of the copies to a CUDA device; None on other devices.

    Attributes:
        arrays: Name to the array in the memory on the CPU.
        views: Name to the tensor on the device.
    """

    def __init__(self, tensors: Mapping[str, Tensor], stream: "torch.cuda.Stream | None") -> None:
        first = next(iter(tensors.values()))
        self._device = first.device
        starts, size = [], 0
        for tensor in tensors.values():
            starts.append(size)
            size += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
        self._host = torch.empty(size, dtype=first.dtype, pin_memory=self._device.type == "cuda")
        is_near = self._device.type == "cpu"
        self._near = self._host if is_near else torch.empty(size, dtype=first.dtype, device=self._device)
        self.views: dict[str, Tensor] = {}
        self.arrays: dict[str, NDArray[Any]] = {}
        for (name, tensor), start in zip(tensors.items(), starts, strict=True):
            part = slice(start, start + tensor.numel())
            self.views[name] = self._near[part].view(tensor.shape)
            self.arrays[name] = self._host[part].view(tensor.shape).numpy()
        self._stream = stream
        self._fetched = torch.cuda.Event() if stream is not None else None
        self._landed = torch.cuda.Event() if stream is not None else None

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the device into `arrays`, and wait until they are there."""
        torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()))
        if self._near is not self._host:
            self._host.copy_(self._near, non_blocking=self._stream is not None)
            if self._stream is not None:
                torch.cuda.current_stream(self._device).synchronize()

    def fetch(self) -> None:
        """Begin to copy `arrays` to the device. Any thread may call this method."""
        if self._stream is None:
            if self._near is not self._host:
                self._near.copy_(self._host)
            return
        assert self._fetched is not None
        assert self._landed is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._landed)
            self._near.copy_(self._host, non_blocking=True)
            self._fetched.record(self._stream)

    def land(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the fetched values into tensors of the device, after the work in its current stream."""
        if self._fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(self._fetched)
        torch._foreach_copy_(list(tensors.values()), [self.views[name] for name in tensors])
        if self._landed is not None:
            self._landed.record(torch.cuda.current_stream(self._device))

    def reuse(self) -> None:
        """Wait until the memory on the CPU may be filled again: until the last `fetch` has copied it."""
        if self._fetched is not None:
            self._fetched.synchronize()


class Lanes:
    """Staging memory for arrays of several devices and types, a lane for each device and type.

    Args:
        tensors: Tensors by name.
        streams: Streams of the copies, by device; `copy_streams` makes them.

    Attributes:
        arrays: Name to the array in the memory on the CPU.
        views: Name to the tensor on its device.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], streams: "Mapping[torch.device, torch.cuda.Stream]"
    ) -> None:
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            groups.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
        self._lanes = [
            (Lane(group, streams.get(device)), frozenset(group)) for (device, _), group in groups.items()
        ]
        self.arrays: dict[str, NDArray[Any]] = {
            name: array for lane, _ in self._lanes for name, array in lane.arrays.items()
        }
        self.views: dict[str, Tensor] = {
            name: view for lane, _ in self._lanes for name, view in lane.views.items()
        }

    def _split(self, tensors: Mapping[str, Tensor]) -> list[tuple[Lane, Mapping[str, Tensor]]]:
        if len(self._lanes) == 1:
            return [(self._lanes[0][0], tensors)] if tensors else []
        found: list[tuple[Lane, Mapping[str, Tensor]]] = []
        for lane, names in self._lanes:
            if mine := {name: tensor for name, tensor in tensors.items() if name in names}:
                found.append((lane, mine))
        return found

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Copy tensors into memory on the CPU, and return them as arrays."""
        for lane, mine in self._split(tensors):
            lane.take(mine)
        return {name: self.arrays[name] for name in tensors}

    def fetch(self) -> None:
        """See `Lane.fetch`."""
        for lane, _ in self._lanes:
            lane.fetch()

    def land(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Lane.land`."""
        for lane, mine in self._split(tensors):
            lane.land(mine)

    def reuse(self) -> None:
        """See `Lane.reuse`."""
        for lane, _ in self._lanes:
            lane.reuse()


class Staging:
    """Staging memory for one exchange.

    An unanswered push may be sent again, so its gradients do not share memory with the values of its answer.

    Args:
        tensors: See `Lanes`.
        streams: See `Lanes`.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], streams: "Mapping[torch.device, torch.cuda.Stream]"
    ) -> None:
        self.gradients = Lanes(tensors, streams)
        self.values = Lanes(tensors, streams)


def copy_streams(tensors: Sequence[Tensor]) -> "dict[torch.device, torch.cuda.Stream]":
    """Return a stream for copies to each CUDA device of the tensors."""
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
    return {device: torch.cuda.Stream(device) for device in devices}
