"""`train --optimizer lbfgs`: a network or a step of the user is minimised by L-BFGS over all training images.

The workers are threads of this process. The servers are in this process, with ``--store`` on disk. Or the
servers belong to the cluster at ``--controller``, with its copies and disks. An iteration counts as an epoch
of the report: a pass over all images for each evaluation of the line search.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from adam_async.checkpoint.names import FILE_NAME
from adam_async.cli.live_table import introduction
from adam_async.cli.options import WAITING, TrainOptions
from adam_async.cli.results import Kept, write_results
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.terminal import Terminal
from adam_async.cli.token import read_token
from adam_async.data_server.dataset import Dataset
from adam_async.errors import AdamError, ConfigError, DeadlineExceeded, counted
from adam_async.lbfgs.image_loss import ImageLoss
from adam_async.lbfgs.optimizer import LBFGS, Iteration
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import Layer
from adam_async.model.network import Network
from adam_async.report.report import build_report
from adam_async.run.addresses import addresses_in
from adam_async.run.config import GROUP_IMAGES, OPTIONS, Config
from adam_async.run.model_selection import choose_model
from adam_async.run.result import EpochResult, RunResult
from adam_async.run.step_model import StepModel
from adam_async.run.train_step import TrainStep
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import describe_machine
from adam_async.store.store import ParameterStore
from dataflow import ComputePool

BATCH_IMAGES = 256
"""Default number of images of a batch."""

LEAVE_S = 5.0
"""Maximum wait for the workers of other processes at the end, in seconds."""

ITERATIONS = 100
"""Default number of iterations."""

HAS_EFFECT = frozenset(
    "model data damaged size cache spill epochs replicas images_per_group shard_bytes seed kernels dtype "
    "link waits".split()
)
"""Options of a run that have an effect with L-BFGS."""

OF_COMMAND = frozenset(
    "step_path layers log_level log_format health config report out step step_args optimizer controller "
    "token_file quiet wait verbose store attach replace".split()
)
"""Options of the command that have an effect with L-BFGS."""

OF_COORDINATOR = frozenset("epochs replicas report out attach replace".split())
"""Options that have no effect with a worker alone."""


def check_lbfgs(options: TrainOptions, config: Config, *, is_launched: bool) -> None:
    """Check that each given option has an effect. Raises ConfigError: an option has no effect; the error
    names the option."""
    if is_launched:
        raise ConfigError("launch starts roles of runs, and --optimizer lbfgs has none: use adam-async train")
    if options.optimizer == "lbfgs-worker" and options.controller is None:
        raise ConfigError(
            "--optimizer lbfgs-worker works for a command at the same cluster: add --controller"
        )
    if config.augment:
        raise ConfigError(
            "--augment changes images at random, and L-BFGS needs a loss that is a function of the values: "
            "leave --augment out, or leave out --optimizer"
        )
    if addresses_in(config.data):
        raise ConfigError(
            f"--data {config.data} names data servers, and L-BFGS reads all images in each evaluation: name "
            "the images themselves"
        )
    given = {name for name, option in OPTIONS.items() if getattr(config, name) != option.default}
    given |= {each.name for each in fields(options) if getattr(options, each.name) != each.default}
    effective = HAS_EFFECT | OF_COMMAND
    if options.optimizer == "lbfgs-worker":
        effective -= OF_COORDINATOR
    if idle := sorted(given - effective):
        cure = (
            "give --store, and the same command goes on"
            if idle[0] in ("checkpoint", "resume")
            else "leave it out"
        )
        raise ConfigError(
            f"--{idle[0].replace('_', '-')} has no effect with --optimizer {options.optimizer}: {cure}"
        )
    if options.attach not in (None, WAITING):
        raise ConfigError(
            "--attach takes no RUN with --optimizer lbfgs, because its store has the model's name"
        )


async def minimise(
    options: TrainOptions,
    config: Config,
    dataset: Dataset,
    *,
    model_text: str | None,
    layers: Mapping[str, type[Layer]],
    step: TrainStep | None,
    environment: Mapping[str, str],
    disk: Disk,
    terminal: Terminal,
) -> int:
    """Minimise, print each iteration, and write the model and the report; returns the exit code.

    Raises:
        ConfigError: An option has no effect, or the model draws random numbers or is frozen.
        AdamError: See `LBFGS.minimise`.
    """
    data = dataset.info()
    loss = _loss_of(config, dataset, model_text=model_text, layers=layers, step=step)
    network = loss.model
    first = (
        network.initial(config.seed)
        if isinstance(network, StepModel)
        else network.initial_weights(Dice(config.seed))
    )
    token = await read_token(options.token_file, environment, role="client")
    waits = config.waits if config.waits.meet_s else waits_at_start(options.wait, config.waits)
    async with (
        ComputePool(threads=1, name="evaluate") as pool,
        ParameterStore.open(
            options.controller or "local", first, name=f"lbfgs-{network.spec.name}",
            shard_bytes=config.shard_bytes, link=config.link, token=token, waits=waits,
            dir=options.store, durable=options.store is not None,
        ) as store,
    ):  # fmt: skip
        if options.optimizer == "lbfgs-worker":
            await LBFGS.assist(store, loss, loss.batches)
            return 0
        for line in introduction(data, network):
            terminal.print(line)
        most = config.epochs or ITERATIONS  # with those of a lost command
        progress = _Progress(store, pool, network, dataset, terminal, most)
        await progress.begin()
        optimizer = LBFGS(store, loss, loss.batches, workers=config.replicas)
        if options.controller and not (options.attach or options.replace) and await optimizer.was_left():
            raise ConfigError(
                f"store {store.name!r} has an L-BFGS that has not ended: --attach goes on with it if its "
                "command is lost, and --replace begins anew with its values"
            )
        try:
            result = await optimizer.minimise(most, progress.take, anew=options.replace)
        except (asyncio.CancelledError, AdamError, ExceptionGroup) as error:
            if epochs := progress.epochs:
                write = partial(
                    _write, options, config, environment, disk, network, progress.values, data, epochs
                )
                await _keep(options, write, epochs[-1], terminal, isinstance(error, asyncio.CancelledError))
            raise
        weights = {name: np.array(array) for name, array in (await store.pull()).items()}
        await _delete(store, optimizer)
    epochs = progress.epochs
    accuracy = f"{epochs[-1].test_accuracy:.2%}" if epochs else "unknown"
    terminal.out.print(
        f"test accuracy {accuracy} after {counted(result.number, 'epoch')}, loss {result.value:.6g}"
        f"{f': {result.reason}' if result.reason else ''}"
    )
    await _write(options, config, environment, disk, network, weights, data, epochs)
    if options.out is not None:
        terminal.print(f"saved  {options.out / FILE_NAME}")
    return 0


class _Progress:
    """The iterations of the command: their losses, the accuracy of their values, and their times.

    Args:
        most: Number of the iteration that is the last one.
    """

    def __init__(
        self,
        store: ParameterStore,
        pool: ComputePool,
        network: Network | StepModel,
        dataset: Dataset,
        terminal: Terminal,
        most: int,
    ) -> None:
        self.epochs: list[EpochResult] = []
        self.values: Mapping[str, Any] = {}
        """Values of the store after the newest iteration."""
        self._store = store
        self._pool = pool
        self._network = network
        self._dataset = dataset
        self._terminal = terminal
        self._most = most
        self._begun = 0.0

    async def begin(self) -> None:
        """Note the time and the values before the first iteration."""
        self._begun = asyncio.get_running_loop().time()
        self.values = await self._store.pull()

    async def take(self, iteration: Iteration) -> bool:
        """Print an iteration that has ended; return whether another one follows."""
        loop, dataset = asyncio.get_running_loop(), self._dataset
        train_s = loop.time() - self._begun
        self.values = await self._store.pull()
        right = await self._pool.run(
            _count_right, self._network, self.values, dataset.test_images, dataset.test_labels
        )
        epoch = EpochResult(
            epoch=iteration.number,
            images=len(dataset.train_labels),
            skipped=0,
            train_loss=iteration.value,
            test_accuracy=right / max(len(dataset.test_labels), 1),
            train_s=train_s,
        )
        self.epochs.append(epoch)
        self._terminal.print(str(epoch))
        self._begun = loop.time()
        return iteration.number < self._most


def _loss_of(
    config: Config,
    dataset: Dataset,
    *,
    model_text: str | None,
    layers: Mapping[str, type[Layer]],
    step: TrainStep | None,
) -> ImageLoss:
    """Return the loss of the step, or of the network that the options name, over the training images."""
    if not isinstance(dataset.train_images, np.ndarray):
        raise ConfigError("L-BFGS reads all images in each evaluation: give a larger --cache")
    model: Network | TrainStep | None = step
    if model is None:
        spec = choose_model(config.model, dataset.info(), text=model_text, layers=layers)
        model = Network(spec, config.dtype, kernels=config.kernels, layers=layers)
    images = config.images_per_group if config.images_per_group != GROUP_IMAGES else BATCH_IMAGES
    return ImageLoss(model, dataset.train_images, dataset.train_labels, batch=images)


async def _delete(store: ParameterStore, optimizer: LBFGS) -> None:
    """Delete the stores once the workers have left, so that they see an end, not a loss."""
    membership, record = store.link.membership, store.link.store
    with suppress(DeadlineExceeded):
        await membership.wait_for(lambda now: len(now.pushers(record)) <= 1, "workers to leave", LEAVE_S)
    await optimizer.forget()
    await store.delete()


def _count_right(model: Network | StepModel, values: Any, images: Any, labels: Any) -> float:
    if isinstance(model, StepModel):
        return model.count_right(model.tensors(values), images, labels)
    return int(np.count_nonzero(model.predict(values, images) == labels)) if len(labels) else 0


async def _keep(
    options: TrainOptions,
    write: Callable[[str], Awaitable[None]],
    last: EpochResult,
    terminal: Terminal,
    interrupted: bool,
) -> None:
    """Write the results of a command that ends early, and print a line about them."""
    kept = (
        [f"the weights of epoch {last.epoch} in {options.out / FILE_NAME}"] if options.out is not None else []
    )
    kept += [f"the report in {options.report}"] if options.report is not None else []
    try:
        await write("interrupted" if interrupted else "failed")
    except ConfigError as error:
        kept = [str(error)]
    done = f"after epoch {last.epoch}, with {last.accuracies}"
    if line := Kept(done, True, tuple(kept)).sentence(interrupted=interrupted):
        terminal.notice(line)


async def _write(
    options: TrainOptions,
    config: Config,
    environment: Mapping[str, str],
    disk: Disk,
    model: Network | StepModel,
    weights: Mapping[str, Any],
    data: dict[str, Any],
    epochs: Sequence[EpochResult],
    ended: str = "finished",
) -> None:
    result = RunResult(
        epochs=tuple(epochs), weights=weights, model=model, data=data, statistics={}, events=(),
        kept_epoch=epochs[-1].epoch if epochs else 0,
    )  # fmt: skip
    machine = describe_machine(loop=type(asyncio.get_running_loop()).__module__)
    report = build_report(
        result,
        config=config,
        command=("adam-async", *sys.argv[1:]),
        machine=machine,
        baseline=None,
        ended=ended,
    )
    # No rule and no rate has changed the weights.
    used = {**report.config, "rule": "lbfgs", "rate": None}
    await write_results(options, result, replace(report, config=used), disk, environment)
