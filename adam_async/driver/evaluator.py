"""Accuracy of weights on the test or validation images of a data server.

The weights are a copied snapshot of all parameters, also for saving. An evaluation has sample images with
their predictions for the page of a run: the first images, and mistakes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient, SessionIdentity
from adam_async.driver.readiness import no_data_server
from adam_async.errors import RunFailed
from adam_async.messages import ReadTest, TestImages, pack, unpack
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.events import Predicted, PredictedImage
from adam_async.run.shard_table import ShardTable, holders
from adam_async.run.step_model import RunModel, StepModel
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.machine import available_bytes
from adam_async.runtime.traffic import Traffic
from adam_async.worker.puller import Landing, Puller, WorkerWeights
from dataflow import ComputePool
from transport import BufferPool, Identity, Network, RemoteProtocolError, TransportError

MOST_LOOKED_AT = 1000
"""Maximum number of test images among which the mistakes are."""

SHOWN = 12
"""Maximum number of first images, and of mistakes."""

MOST_SIDE = 32
"""Maximum height and width of an image, in pixels; of a larger one every second pixel, or fewer, is kept."""


def sample_images(
    epoch: int, images: NDArray[np.uint8], labels: NDArray[np.int64], scores: NDArray[np.float32]
) -> Predicted | None:
    """Return the first images and the most confident mistakes; None if a page can show no image.

    Args:
        images: Pixels (N, C, H, W), with one channel or three; images without scores are not shown.
        labels: Classes (N,).
        scores: Scores (n, classes) of the first images, before the softmax.
    """
    images, labels = images[: len(scores)], labels[: len(scores)]
    if not len(images) or images.shape[1] not in (1, 3) or scores.shape[1] < 2:
        return None
    stretched = np.exp(scores - scores.max(axis=1, keepdims=True), dtype=np.float64)
    shares = stretched / stretched.sum(axis=1, keepdims=True)
    guesses = shares.argmax(axis=1)
    confidence = np.nan_to_num(shares.max(axis=1))
    wrong = np.flatnonzero(guesses != labels)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")][:SHOWN]
    step = -(-max(images.shape[2:]) // MOST_SIDE)
    small = images[:, :, ::step, ::step]

    def image(n: int) -> PredictedImage:
        return PredictedImage(
            pixels=np.ascontiguousarray(small[n].transpose(1, 2, 0)).tobytes(),
            label=int(labels[n]),
            predicted=int(guesses[n]),
            confidence=round(float(confidence[n]), 4),
        )

    _, channels, height, width = small.shape
    return Predicted(
        epoch=epoch,
        height=height,
        width=width,
        channels=channels,
        first=tuple(image(n) for n in range(min(SHOWN, len(images)))),
        mistakes=tuple(image(int(n)) for n in wrong),
    )


TEST_CHUNK = 1000
"""Maximum number of test images in one message."""

MESSAGE_SHARE = 2
"""Divisor of a link's maximum message size that gives the maximum size of the test images in one message,
unless a single image is larger."""

AGAIN_S = 0.1
"""Pause in seconds between a failed request for the images and the next one."""


class Evaluator:
    """Evaluates weights on test images, which it reads once.

    Args:
        endpoint: The driver's end of the links.
        pool: Runs the evaluation, on `threads` threads.
        available_bytes: Returns the memory of this process for images, in bytes. A data server states its
            number of images; the evaluator refuses images that do not fit into memory.
        most: Maximum number of images of a set, the first ones; None: all.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        waits: Waits,
        pool: ComputePool,
        threads: int,
        available_bytes: Callable[[], int] = available_bytes,
        most: int | None = None,
    ) -> None:
        self._most = most
        self._endpoint = endpoint
        self._waits = waits
        self._pool = pool
        self._threads = threads
        self._available_bytes = available_bytes
        self._sets: dict[bool, tuple[NDArray[Any], NDArray[Any]]] = {}
        """Images and labels of the validation split (key True) and of the test set (key False)."""
        self._scores: NDArray[Any] | None = None
        """Scores of the first test images at the last evaluation; None for a step."""

    async def read_sample(self, model: RunModel, address: Callable[[], str]) -> None:
        """Read the sample of training images from a data server, if the model is a step that still lacks it.

        Args:
            address: Returns the address of a data server.
        """
        if isinstance(model, StepModel) and model.lacks_sample:
            model.take_sample(*await self._read_from_any(address, sample=model.spec.sample))

    async def accuracy(
        self,
        model: RunModel,
        weights: Mapping[str, NDArray[Any]],
        address: Callable[[], str],
        *,
        validation: bool = False,
    ) -> float:
        """Return the share of test images that the weights classify correctly; 0 without images.

        Args:
            address: Returns a data server's address; the first evaluation reads the images from this server,
                or from its successor if it is lost.
            validation: Use the images of the validation split, which are the same in all runs of a driver.

        Raises:
            StepFailed: The model is a step whose evaluation raised, or has no accuracy.
        """
        if validation not in self._sets:
            self._sets[validation] = await self._read_from_any(address, validation=validation)
        images, labels = self._sets[validation]
        if isinstance(model, StepModel):
            await self.read_sample(model, address)
            weights = await self._pool.run(model.tensors, weights)
        cuts = np.linspace(0, len(labels), self._threads + 1, dtype=int)
        async with asyncio.TaskGroup() as group:
            parts = [
                group.create_task(
                    self._pool.run(_count_right, model, weights, images[a:b], labels[a:b]),
                    name=f"{self._endpoint.identity.node}/evaluate-{a}",
                )
                for a, b in pairwise(cuts)
            ]
        if not validation:
            self._scores = parts[0].result()[1]
        return sum(part.result()[0] for part in parts) / max(len(labels), 1)

    async def predicted(self, epoch: int) -> Predicted | None:
        """Return sample images with the scores of the last `accuracy`; None for a step or odd images."""
        images, labels = self._sets[False]
        if self._scores is None:
            return None
        return await self._pool.run(sample_images, epoch, images, labels, self._scores)

    async def _read_from_any(
        self, address: Callable[[], str], *, validation: bool = False, sample: int = 0
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read the images; retry for `dial_s` + `grace_s`, because a lost data server has a successor only
        after the controllers notice the loss.

        Raises:
            RoleDied: The run had no data server for `replica_s`.
        """
        loop, waits = asyncio.get_running_loop(), self._waits
        has_server, begin = True, loop.time()
        while True:
            server = address()
            if has_server != bool(server):
                has_server, begin = bool(server), loop.time()
            waited = loop.time() - begin
            if not server and waited > waits.replica_s:
                raise no_data_server(waits.replica_s)
            try:
                if server:
                    return await self._read(server, validation=validation, sample=sample)
            except TransportError:
                if waited > waits.dial_s + waits.grace_s:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _read(
        self, address: str, *, validation: bool = False, sample: int = 0
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read a set of images in messages; `sample` is the largest number of images in a sample.

        Raises:
            RemoteProtocolError: An answer has no images, images of another shape or too many images, or
                states another total than the first.
            RunFailed: This process lacks the memory for the stated number of images.
        """
        found: tuple[NDArray[Any], NDArray[Any]] | None = None
        have, total, whole = 0, 1, 0
        count = 1  # the size of the first image determines how many fit into one message
        async with self._endpoint.connected(address, timeout_s=self._waits.dial_s) as link:
            while have < total:
                body = ReadTest(start=have, stop=have + count, validation=validation, sample=bool(sample))
                reply = await link.call(pack(body), timeout_s=self._waits.call_s)
                stated = unpack(reply, TestImages).total
                _check(reply.tensors, count if stated else 0, like=None if found is None else found[0])
                if found is None:
                    whole, total = stated, stated if self._most is None else min(stated, self._most)
                    found = self._room_for(total, reply.tensors, address, sample)
                read = len(reply.tensors[1])
                if stated != whole or have + read > total:
                    raise RemoteProtocolError(
                        "message",
                        f"test images {have} to {have + read} of {stated}, after an answer with a total of "
                        f"{whole}",
                    )
                for all_of, part in zip(found, reply.tensors, strict=True):
                    all_of[have : have + read] = part
                have += read
                count = _images_in(link.max_message_bytes, reply.tensors)
                if self._most is not None:
                    count = min(count, total - have)
        assert found is not None, "the first request is made in any case"
        return found

    def _room_for(
        self, total: int, tensors: Sequence[NDArray[Any]], address: str, sample: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return arrays for all images and labels of a set, whose first answer has these tensors.

        Raises:
            RemoteProtocolError: The sample has more than `sample` images.
            RunFailed: The arrays do not fit into memory.
        """
        if sample and total > sample:
            raise RemoteProtocolError(
                "message", f"a sample has {total} images, and the step takes {sample} at most"
            )
        images, labels = tensors
        nbytes = total * (prod(images.shape[1:]) + labels.itemsize)
        available = self._available_bytes()
        if nbytes > available:
            raise RunFailed(
                f"the data server at {address} has {total} images of {list(images.shape[1:])} for an "
                f"evaluation, {nbytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory are available: "
                "evaluate on fewer or smaller images"
            )
        return np.empty((total, *images.shape[1:]), np.uint8), np.empty(total, np.int64)


def _check(tensors: Sequence[NDArray[Any]], most: int, *, like: NDArray[Any] | None) -> None:
    """Check the images (n, C, H, W) and labels (n,) of an answer, because the next request depends on n.

    Args:
        tensors: Tensors of the answer.
        most: Number of images asked for; 0 for an empty set.
        like: Images of an earlier answer.
    """
    images, labels = tensors if len(tensors) == 2 else (np.empty(0), np.empty(0))
    known = images.shape[1:] if like is None else like.shape[1:]
    if (
        (images.ndim, images.dtype.name, images.shape[1:]) != (4, "uint8", known)
        or (labels.dtype.name, labels.shape) != ("int64", (len(images),))
        or not min(most, 1) <= len(images) <= most
    ):
        shapes = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors[:4])
        raise RemoteProtocolError("message", f"test images are {shapes or 'absent'}, {most} asked for")


def _images_in(most_bytes: int, tensors: Sequence[NDArray[Any]]) -> int:
    """Return the number of test images per message, at least 1, from the images and labels of an answer."""
    images = max(len(tensors[1]), 1)
    image_bytes = max(sum(tensor.nbytes for tensor in tensors) // images, 1)
    return min(max(most_bytes // MESSAGE_SHARE // image_bytes, 1), TEST_CHUNK)


@np.errstate(over="ignore", invalid="ignore")
def _count_right(
    model: RunModel, weights: Mapping[str, NDArray[Any]], images: NDArray[Any], labels: NDArray[Any]
) -> tuple[float, NDArray[Any] | None]:
    """Return the number of images classified correctly, and the first images' scores; None for a step."""
    if isinstance(model, StepModel):
        return model.count_right(weights, images, labels), None
    if not len(labels):
        return 0, None
    scores = model.scores(weights, images).reshape(len(labels), -1)
    return int(np.count_nonzero(scores.argmax(axis=1) == labels)), scores[:MOST_LOOKED_AT].copy()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSnapshot:
    """A copy of all parameters."""

    weights: dict[str, NDArray[Any]]
    """Values by tensor, each in its shape."""
    versions: tuple[int, ...]
    """Version of each shard, in the order of the table."""


def reading_client(
    cluster: ClusterMap,
    table: ShardTable,
    *,
    network: Network,
    identity: Identity,
    waits: Waits,
    traffic: Traffic,
) -> ParameterClient:
    """For a driver, make a client of the bundles in a run's store; the client pushes nothing."""
    run = cluster.run
    assert run is not None, "a run has shards"
    session = SessionIdentity(
        store=run.id, session=0, incarnation=identity.incarnation, replica=-1, generation=cluster.generation
    )
    return ParameterClient(
        Endpoint(network, identity, traffic),
        session,
        homes=holders(table, cluster.buckets),
        cluster=cluster,
        waits=waits,
    )


async def follow_primaries(client: ParameterClient, changes: AsyncIterator[ClusterMap]) -> None:
    """Pass each cluster map to a client, until cancelled."""
    async for cluster in changes:
        client.map_changed(cluster)


@asynccontextmanager
async def running(
    client: ParameterClient, changes: AsyncIterator[ClusterMap], *, node: str
) -> AsyncIterator[None]:
    """Run a client, which follows the primaries, until the end of the block."""
    async with asyncio.TaskGroup() as group:
        works = (client.run(), follow_primaries(client, changes))
        tasks = [group.create_task(work, name=f"{node}/rescue") for work in works]
        yield
        for task in tasks:
            task.cancel()


async def pull_snapshot(
    network: RunModel, table: ShardTable, cluster: ClusterMap, client: ParameterClient, *, clock: int = 0
) -> ModelSnapshot:
    """Pull every tensor once. Each shard has one version; different shards may be from different moments.

    Cancellation loses nothing.

    Args:
        clock: Clock up to which the values contain all pushes of live replicas; frozen tensors have no
            pushes.

    Raises:
        ShardUnavailable: The primary of a bundle did not answer in time.
    """
    weights = WorkerWeights()
    landed = asyncio.Event()
    puller = Puller(
        network=network,
        table=table,
        buckets=cluster.buckets,
        client=client,
        weights=weights,
        buffers=BufferPool(),
    )
    frozen = [shard for shard in table.shards if shard.tensor in network.frozen]
    trained = [shard for shard in table.shards if shard.tensor not in network.frozen]
    questions = [(0, *question) for question in puller.questions(frozen)]
    questions += [(clock, *question) for question in puller.questions(trained)]
    landing = Landing(puller, [layout for _, _, layout in questions], len(questions), landed.set)
    for number, (bound, server, _) in enumerate(questions):
        puller.ask(landing, server, number, clock=bound)
    await client.flush()
    await landed.wait()
    copies = weights.snapshot().copies
    return ModelSnapshot(
        weights={name: copy.array.copy() for name, copy in copies.items()},
        versions=tuple(version for name in table.by_tensor for version in copies[name].versions),
    )
