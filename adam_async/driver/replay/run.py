"""Pure: a recorded run, repeated in one process to the last bit.

    replay = Replay(recording, dataset)
    for epoch in recording.header.epochs:
        for _ in replay.steps(epoch): ...
        replay.accuracy(epoch)
    for _ in replay.steps(): ...
    replay.check()

The replay decides nothing: the roles' code makes images, values, gradients and steps, in the order of
`playback.py`. The replay must refuse the same pushes as the servers did.
"""

from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, ValidationSplit, check_validation, sample_of
from adam_async.data_server.epoch import EpochOrder, EpochOrders
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.driver.replay.decode import recorded_step
from adam_async.driver.replay.playback import Playback
from adam_async.driver.replay.recording import Header, RecordedEpoch, Recording
from adam_async.driver.replay.shards import Pushes, RecordedModel, ReplayedShards
from adam_async.driver.replay.worker import ReplayedWorker
from adam_async.errors import RecordError, RunFailed
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.run.partition import table_of
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.store_record import NUM_BUCKETS
from adam_async.run.user_code import NamedStep, check_named, functions_for
from adam_async.run.user_rules import RuleSource
from adam_async.worker.push_plan import plan_pushes

ORDERS_KEPT = 8
"""Maximum number of epochs whose image orders are in memory: a run's workers are in few epochs at a time, and
a forged record may have each group in another epoch."""


class ReplayDiffers(RunFailed):
    """The results differ from the run's: another data set, library or processor, or a defect."""


def digest(network: RunModel, weights: Mapping[str, NDArray[Any]]) -> str:
    """Return a digest of all values, to the last bit."""
    hashed = blake2b(digest_size=16)
    for parameter in network.parameters:
        values = np.ascontiguousarray(weights[parameter.name])
        hashed.update(f"{parameter.name} {values.dtype} {values.shape}\n".encode())
        hashed.update(values.tobytes())
    return hashed.hexdigest()


class Replay:
    """Repeats one recorded run.

    Args:
        functions: Transforms of the record, as ``package.module:function``, that the replay may import.
        step: Step of the record, if the run trained one.
        rules: User rules that the replay may apply; None: none.

    Raises:
        ConfigError: The record names another function to import, another step, or a user rule that is not
            among `rules` or has another file.
        StepFailed: The step raised.
        RecordError: The record is damaged, or the run has other data.
        SpecError: The kernels of the run are not installed here.
    """

    def __init__(
        self,
        recording: Recording,
        dataset: Dataset,
        *,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        functions: Collection[str] = (),
        step: NamedStep | None = None,
        rules: RuleSource | None = None,
    ) -> None:
        header = recording.header
        check_named(header.transforms, "the record", allowed=functions)
        _check_data(header.data, dataset)
        config = header.options()
        check_validation(config.validation, dataset.info())
        self._dataset = dataset
        split = ValidationSplit.of(dataset.train_labels, count=config.validation, seed=config.seed)
        self._trained = split.trained
        self._epoch_orders = EpochOrders(
            Dice(config.seed), num_images=len(split.trained), images_per_group=config.images_per_group
        )
        self._orders: dict[int, EpochOrder] = {}
        self._dice, self._recipe = Dice(config.seed), None
        if header.transforms:
            self._recipe = Recipe.of(
                header.transforms,
                dataset.image_shape,
                kernels=header.kernels,
                functions=functions_for(header.transforms, {}),
            )
        self.header = header
        self.network = self._new_model(layers, step)
        table = self._table = table_of(self.network, shard_bytes=config.shard_bytes)
        _check_header(header, len(table.shards))
        rule = rule_of(config)
        plan = plan_pushes(
            self.network,
            table,
            header.buckets,
            images=config.images_per_group * config.push_every,
            wanted=config.protocol,
        )
        model = self._model = RecordedModel(config, self.network, table, header.buckets)
        self._plan = plan
        self._shards = ReplayedShards(model, rule, rules or RuleSource())
        self._pushes = Pushes(table.shards, self.network.dtype, recording)
        self._recording = recording
        self._workers: dict[int, ReplayedWorker] = {}
        """Clients with trained and untrained groups: a run may have many, one after the other."""
        numbers = {p.name: number for number, p in enumerate(self.network.parameters)}
        tensors = np.array([numbers[spec.tensor] for spec in table.shards], np.int64)
        self._playback = Playback(recording, self, tensors)
        self.groups = 0

    def _new_model(self, layers: Mapping[str, type[Layer]], step: NamedStep | None) -> RunModel:
        """Make the record's network, or take its step, with the sample of training images."""
        header, config = self.header, self.header.options()
        model = recorded_step(header, step)
        if model is None:
            spec = ModelSpec.from_dict(header.spec)
            return Network(spec, dtype=config.dtype, kernels=header.kernels, layers=layers)
        if model.lacks_sample:
            chosen = sample_of(self._trained, model.spec.sample, seed=config.seed)
            model.take_sample(self._dataset.train_images[chosen], self._dataset.train_labels[chosen])
        return model

    def steps(self, epoch: RecordedEpoch | None = None) -> Iterator[None]:
        """Play up to the evaluated values of an epoch; without an epoch, to the end of the run.

        Raises:
            RecordError: The record is damaged.
            ReplayDiffers: Only the replay or only the run refused a gradient.
        """
        return self._playback.advance(None if epoch is None else np.array(epoch.versions, np.int64))

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return a copy of all current values."""
        return {name: array.copy() for name, array in self._shards.weights().items()}

    @np.errstate(over="ignore", invalid="ignore")
    def accuracy(self, epoch: RecordedEpoch) -> float:
        """Return the test accuracy of the values after an epoch; call this once, after the epoch's steps."""
        versions = np.array(epoch.versions, np.int64)
        weights = {
            name: self._shards.tensor(name, versions[[spec.id for spec in shards]].tolist())
            for name, shards in self._table.by_tensor.items()
        }
        self._playback.release(versions)
        images, labels = self._dataset.test_images, self._dataset.test_labels
        if isinstance(self.network, StepModel):
            right = self.network.count_right(self.network.tensors(weights), images, labels)
            return right / max(len(labels), 1)
        named = self.network.predict(weights, images)
        return int(np.count_nonzero(named == labels)) / max(len(labels), 1)

    def check(self) -> None:
        """Check that the final values equal those of the run. Raises ReplayDiffers: the values differ."""
        if digest(self.network, self._shards.weights()) != self.header.weights:
            raise ReplayDiffers(
                "the replay ended with other weights than the run: other training images than those of the "
                "run, or another processor or library; the record names its machine"
            )

    # --- the player ------------------------------------------------------------------------------

    def train(self, client: int, group: int) -> None:
        """See `Player.train`."""
        reads = self._recording.reads[client]
        if not group:
            self._workers[client] = ReplayedWorker(
                client=client,
                reads=reads,
                model=self._model,
                plan=self._plan,
                shards=self._shards,
                pushes=self._pushes,
                images=self._images,
            )
        self._workers[client].train(group)
        if group + 1 == len(reads.clocks):
            del self._workers[client]
        self.groups += 1

    def apply(self, shard: int, batch: int) -> None:
        """See `Player.apply`."""
        order = self._recording.orders[shard]
        begin, end = int(order.bounds[batch]), int(order.bounds[batch + 1])
        keys = [(shard, int(order.clients[entry]), int(order.clocks[entry])) for entry in range(begin, end)]
        if order.skipped[begin]:  # such a push forms a batch alone
            self._pushes.settle(*keys[0])
            return
        pushes = [self._pushes.get(*key) for key in keys]
        finite = (self._shards.apply_sum if order.summed else self._shards.apply)(shard, pushes)
        for entry, key, ok in zip(range(begin, end), keys, finite, strict=True):
            if ok == order.refused[entry]:
                was, now = ("refused", "finite") if ok else ("applied", "not finite")
                replica = self._recording.reads[key[1]].replica
                raise ReplayDiffers(
                    f"shard {shard} {was} the push of replica {replica} with clock {key[2]} in the run, and "
                    f"here it is {now}"
                )
            self._pushes.settle(*key)

    def keep(self, shard: int, version: int) -> None:
        """See `Player.keep`."""
        self._shards.keep(shard)

    def drop(self, shard: int, version: int) -> None:
        """See `Player.drop`."""
        self._shards.drop(shard, version)

    def _images(self, epoch: int, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return images and labels of a group."""
        order = self._orders.get(epoch)
        if order is None:
            if len(self._orders) == ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
            skipped = [before.skipped_groups for before in self.header.epochs[: epoch - 1]]
            order = self._orders[epoch] = self._epoch_orders.order(epoch, skipped)
        if number >= order.num_groups:
            raise RecordError(
                f"the record is damaged: a step has group {number} of epoch {epoch}, which has "
                f"{order.num_groups} groups"
            )
        chosen = self._trained[order.group(number)]
        images = self._dataset.train_images[chosen]
        if self._recipe is not None:
            images = self._recipe.apply(images, chosen, dice=self._dice, epoch=epoch)
        return images, self._dataset.train_labels[chosen]


def _check_header(header: Header, shards: int) -> None:
    """Raise RecordError if a record's file names buckets or versions of another model than its own."""
    lengths = {len(epoch.versions) for epoch in header.epochs}
    if len(header.buckets) != NUM_BUCKETS or lengths - {shards}:
        raise RecordError(
            f"the record is damaged: its header is not that of a model with {shards} shards in "
            f"{NUM_BUCKETS} buckets"
        )


def _check_data(recorded: Mapping[str, Any], dataset: Dataset) -> None:
    here = dataset.info()
    other = [
        f"{name} {recorded.get(name)} there, {here[name]} here"
        for name in ("name", "shape", "classes", "train_images", "test_images")
        if recorded.get(name) != here[name]
    ]
    if other:
        raise RecordError(f"the run had other data than these: {'; '.join(other)}; name its data by --data")
