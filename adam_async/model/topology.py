"""Pure: the graph of a network's layers, and the memory that layers share.

Numbers represent layers, in spec order; `INPUT_INDEX` represents the images. Each of a network's sets of
kernels has one topology.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adam_async.errors import SpecError
from adam_async.model.layer import Layer, Loss
from adam_async.model.spec import INPUT, ModelSpec

INPUT_INDEX = -1

MAX_PARAMETERS = 1 << 31
"""Maximum number of a model's parameters: 8 GiB of float32. A larger number counts as a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Layers and the edges between them.

    Attributes:
        layers: The layers, inputs first; the last is the loss.
        producers: For each layer, the numbers of the layers that it reads.
        consumers: For each layer, a pair (reader, position among the reader's inputs) per reader.
        wants_error: For each layer, whether it or an earlier layer has parameters to train; only then does
            training need the error gradient of its output.
        shares: For each layer, whether its output is in the memory of its input.
        hosts: For each layer whose output is in the memory of a later layer's output: the later layer, and
            the first feature of the output there.
    """

    layers: tuple[Layer, ...]
    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[tuple[int, int], ...], ...]
    wants_error: tuple[bool, ...]
    shares: tuple[bool, ...]
    hosts: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, spec: ModelSpec, kinds: Mapping[str, type[Layer]]) -> "Topology":
        """Build the layers of a spec, checking shapes layer by layer.

        Raises:
            SpecError: A kind or option is unknown, shapes do not fit, no layer reads an output, the loss is
                not last, all parameters are frozen, or there are more than `MAX_PARAMETERS`.
        """
        numbers = {INPUT: INPUT_INDEX} | {layer.name: number for number, layer in enumerate(spec.layers)}
        layers: list[Layer] = []
        for described in spec.layers:
            if described.kind not in kinds:
                raise SpecError(
                    f"layer {described.name!r}: unknown kind {described.kind!r}; "
                    f"known kinds: {', '.join(kinds)}"
                )
            if issubclass(kinds[described.kind], Loss) and described is not spec.layers[-1]:
                raise SpecError(f"layer {described.name!r} is a loss, which must be the last layer")
            shapes = tuple(
                spec.input_shape if source == INPUT else layers[numbers[source]].output_shape
                for source in described.inputs
            )
            layers.append(kinds[described.kind](described, shapes))
        _check_size(layers)
        producers = tuple(tuple(numbers[source] for source in layer.inputs) for layer in spec.layers)
        _check_ends(layers, _consumers(producers))
        _check_frozen(layers)
        wants_error: list[bool] = []
        for layer, sources in zip(layers, producers, strict=True):
            wants_error.append(
                any(not parameter.frozen for parameter in layer.parameters)
                or any(source >= 0 and wants_error[source] for source in sources)
            )
        return cls.join(layers, producers, wants_error)

    @classmethod
    def join(
        cls, layers: Sequence[Layer], producers: Sequence[tuple[int, ...]], wants_error: Sequence[bool]
    ) -> "Topology":
        """Join layers that fit. A partition may lack a loss, and may have outputs without a reader."""
        consumers = _consumers(producers)
        shares = _sharing(layers, producers, consumers)
        return cls(
            layers=tuple(layers),
            producers=tuple(producers),
            consumers=consumers,
            wants_error=tuple(wants_error),
            shares=shares,
            hosts=_hosting(layers, producers, consumers, shares),
        )


def _consumers(producers: Sequence[tuple[int, ...]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(
        tuple(
            (reader, position)
            for reader, sources in enumerate(producers)
            for position, source in enumerate(sources)
            if source == number
        )
        for number in range(len(producers))
    )


def _check_size(layers: list[Layer]) -> None:
    total = 0
    for layer in layers:
        size = sum(parameter.size for parameter in layer.parameters)
        total += size
        if total > MAX_PARAMETERS:
            raise SpecError(
                f"layer {layer.name!r} has {size} parameters, which makes {total} so far; "
                f"a model may have {MAX_PARAMETERS}: make it smaller"
            )


def _check_ends(layers: list[Layer], consumers: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    for layer, readers in zip(layers[:-1], consumers, strict=False):
        if not readers:
            raise SpecError(f"layer {layer.name!r} is read by no other layer")
    if not isinstance(layers[-1], Loss):
        raise SpecError(f"the last layer must be a loss, but {layers[-1].name!r} is a {layers[-1].spec.kind}")


def _check_frozen(layers: list[Layer]) -> None:
    for layer in layers:
        if layer.frozen and not layer.parameters:
            raise layer.refusal("has no parameters, so option 'frozen' has no effect; remove it")
    parameters = [parameter for layer in layers for parameter in layer.parameters]
    if parameters and all(parameter.frozen for parameter in parameters):
        names = ", ".join(dict.fromkeys(parameter.layer for parameter in parameters))
        raise SpecError(f"every layer with parameters is frozen ({names}): no parameters are left to train")


def _sharing(
    layers: Sequence[Layer],
    producers: Sequence[tuple[int, ...]],
    consumers: tuple[tuple[tuple[int, int], ...], ...],
) -> tuple[bool, ...]:
    """Decide which layers work in their input's memory.

    A layer with `SHARES_INPUT` works in its input's memory on three conditions: the input is another layer's,
    no other layer reads the input, and no backward reads values that the layer changes there.
    """
    shares: list[bool] = []
    read_later: list[bool] = []  # whether backward reads the memory of this layer's output
    for layer, sources in zip(layers, producers, strict=True):
        source = sources[0] if sources else INPUT_INDEX
        shared = (
            layer.SHARES_INPUT
            and source != INPUT_INDEX
            and len(consumers[source]) == 1
            and not (layer.OVERWRITES and read_later[source])
        )
        shares.append(shared)
        hosted = layer.hosts_at is not None and source != INPUT_INDEX
        read_later.append(layer.READS_OUTPUT or ((shared or hosted) and read_later[source]))
    return tuple(shares)


def _hosting(
    layers: Sequence[Layer],
    producers: Sequence[tuple[int, ...]],
    consumers: tuple[tuple[tuple[int, int], ...], ...],
    shares: Sequence[bool],
) -> dict[int, tuple[int, int]]:
    """Find layers whose output is a part of a later output; of layers that share memory, only the first."""
    hosts: dict[int, tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        if layer.hosts_at is None or producers[number][0] == INPUT_INDEX:
            continue
        first = producers[number][0]
        if len(consumers[first]) > 1:
            continue
        while shares[first]:
            first = producers[first][0]
        hosts[first] = number, layer.hosts_at
    return hosts
