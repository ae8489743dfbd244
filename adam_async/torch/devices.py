"""Staging memory on the CPU between tensors and a store's arrays, and the copies to and from a GPU.

A `StagingBuffer` has the arrays of one device and type. `StagingBuffers` has one for each device and type,
and `Staging` has the memory of one exchange. On CUDA the CPU memory is pinned. `upload` copies values to the
GPU on a separate stream while the program computes, and `copy_into` copies them into the parameters within
the GPU. On MPS the copies block. On the CPU both sides of a buffer are the same memory, so the same code runs
without a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Alignment of the arrays of a buffer, in values: 64 bytes of float32."""


class StagingBuffer:
    """Staging memory for arrays of one device and type, on the CPU and on the device.

    Args:
        tensors: Tensors by name, of one device and type; the arrays get their shapes.
        stream: Stream of the copies to a CUDA device; None on other devices.

    Attributes:
        arrays: Arrays in the memory on the CPU, by name.
        views: Tensors on the device, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], stream: "torch.cuda.Stream | None") -> None:
        first = next(iter(tensors.values()))
        self._device = first.device
        starts, size = [], 0
        for tensor in tensors.values():
            starts.append(size)
            size += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
        # The program may have set another default device.
        pins = self._device.type == "cuda"
        self._host_memory = torch.empty(size, dtype=first.dtype, device="cpu", pin_memory=pins)
        self._device_memory = self._host_memory
        if self._device.type != "cpu":
            self._device_memory = torch.empty(size, dtype=first.dtype, device=self._device)
        self.views: dict[str, Tensor] = {}
        self.arrays: dict[str, NDArray[Any]] = {}
        for (name, tensor), start in zip(tensors.items(), starts, strict=True):
            part = slice(start, start + tensor.numel())
            self.views[name] = self._device_memory[part].view(tensor.shape)
            self.arrays[name] = self._host_memory[part].view(tensor.shape).numpy()
        self._stream = stream
        self._uploaded = torch.cuda.Event() if stream is not None else None
        self._copied = torch.cuda.Event() if stream is not None else None
        if self._copied is not None:
            # The memory may be a freed tensor's, which queued kernels of this stream still read.
            self._copied.record(torch.cuda.current_stream(self._device))

    def download(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the device into `arrays`, and wait until they are there."""
        torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()))
        if self._device_memory is not self._host_memory:
            self._host_memory.copy_(self._device_memory, non_blocking=self._stream is not None)
            if self._stream is not None:
                torch.cuda.current_stream(self._device).synchronize()

    def upload(self) -> None:
        """Begin to copy `arrays` to the device. Any thread may call this method."""
        if self._stream is None:
            if self._device_memory is not self._host_memory:
                self._device_memory.copy_(self._host_memory)
            return
        assert self._uploaded is not None
        assert self._copied is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._copied)
            self._device_memory.copy_(self._host_memory, non_blocking=True)
            self._uploaded.record(self._stream)

    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the uploaded values into tensors of the device, after the work in its current stream."""
        if self._uploaded is not None:
            torch.cuda.current_stream(self._device).wait_event(self._uploaded)
        torch._foreach_copy_(list(tensors.values()), [self.views[name] for name in tensors])
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait_free(self) -> None:
        """Wait until the CPU memory may be filled again: until the last `upload` has copied it."""
        if self._uploaded is not None:
            self._uploaded.synchronize()


class PushMemory:
    """Staging memory for gradients on the CPU, in arrays that servers of this host read.

    Args:
        memory: Result of `ParameterStore.buffers`.

    Attributes:
        arrays: The arrays.
        views: Tensors on their memory, by name.
    """

    def __init__(self, memory: Mapping[str, NDArray[Any]]) -> None:
        self.arrays = memory
        self.views = {name: torch.from_numpy(array) for name, array in memory.items()}

    def download(self, tensors: Mapping[str, Tensor]) -> Mapping[str, NDArray[Any]]:
        """Copy tensors into the arrays, and return these: `arrays` itself if the tensors are all of them."""
        torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()))
        is_whole = len(tensors) == len(self.arrays)
        return self.arrays if is_whole else {name: self.arrays[name] for name in tensors}


class StagingBuffers:
    """Staging memory for arrays of several devices and types, a buffer for each device and type.

    Args:
        tensors: Tensors by name.
        streams: Streams of the copies, by device; made by `copy_streams`.

    Attributes:
        arrays: Arrays in the memory on the CPU, by name.
        views: Tensors on their devices, by name.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], streams: "Mapping[torch.device, torch.cuda.Stream]"
    ) -> None:
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            groups.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
        self._buffers = [
            (StagingBuffer(group, streams.get(device)), frozenset(group))
            for (device, _), group in groups.items()
        ]
        self.arrays: dict[str, NDArray[Any]] = {
            name: array for buffer, _ in self._buffers for name, array in buffer.arrays.items()
        }
        self.views: dict[str, Tensor] = {
            name: view for buffer, _ in self._buffers for name, view in buffer.views.items()
        }

    def _split(self, tensors: Mapping[str, Tensor]) -> list[tuple[StagingBuffer, Mapping[str, Tensor]]]:
        if len(self._buffers) == 1:
            return [(self._buffers[0][0], tensors)] if tensors else []
        found: list[tuple[StagingBuffer, Mapping[str, Tensor]]] = []
        for buffer, names in self._buffers:
            if part := {name: tensor for name, tensor in tensors.items() if name in names}:
                found.append((buffer, part))
        return found

    def download(self, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Copy tensors into memory on the CPU, and return them as arrays."""
        for buffer, part in self._split(tensors):
            buffer.download(part)
        return {name: self.arrays[name] for name in tensors}

    def upload(self) -> None:
        """See `StagingBuffer.upload`."""
        for buffer, _ in self._buffers:
            buffer.upload()

    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """See `StagingBuffer.copy_into`."""
        for buffer, part in self._split(tensors):
            buffer.copy_into(part)

    def wait_free(self) -> None:
        """See `StagingBuffer.wait_free`."""
        for buffer, _ in self._buffers:
            buffer.wait_free()


class Staging:
    """Staging memory for one exchange.

    An unanswered push may be sent again, so its gradients do not share memory with its answer's values.

    Args:
        tensors: See `StagingBuffers`.
        streams: See `StagingBuffers`.
        gradients: Memory of the gradients, if all tensors are on the CPU.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        streams: "Mapping[torch.device, torch.cuda.Stream]",
        gradients: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.gradients = StagingBuffers(tensors, streams) if gradients is None else PushMemory(gradients)
        self.values = StagingBuffers(tensors, streams)


def copy_streams(tensors: Sequence[Tensor]) -> "dict[torch.device, torch.cuda.Stream]":
    """Return a stream for copies to each CUDA device of the tensors."""
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
    return {device: torch.cuda.Stream(device) for device in devices}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device; a copy to CUDA goes through pinned memory, without a wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return tensors as arrays, which share the memory of tensors on the CPU.

    Copies from a CUDA device go to pinned memory, with one wait for all copies.
    """
    found = []
    for tensor in tensors:
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            found.append(pinned.copy_(tensor, non_blocking=True))
        else:
            found.append(tensor.cpu())
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda):
        torch.cuda.current_stream(device).synchronize()
    return [tensor.numpy() for tensor in found]
