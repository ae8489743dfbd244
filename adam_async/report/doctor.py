"""The doctor: checks all that a run needs on this machine.

Every line is one finding: ``ok``; ``slow``, with the name of a faster way; or ``broken`` (a run would fail),
with a remedy. The checks use real parts: several threads multiply matrices at once, a link is opened and
used, the data are loaded, the kernels train.
"""

import asyncio
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.sources.datasets import load_dataset
from adam_async.errors import DataError, install_command
from adam_async.messages import GetMap, MapState, pack, role_table, text_tensor
from adam_async.model import ModelSpec, Sgd, named_model
from adam_async.model import Network as NeuralNetwork
from adam_async.model.keyed_random import Dice
from adam_async.model.working_set import working_sets
from adam_async.report.baseline import measure, measure_sgemm
from adam_async.runtime.disk import Disk
from adam_async.runtime.kernel_cache import VARIABLE, KernelCache, kernel_folder
from adam_async.runtime.machine import Machine, describe_machine, installed_version
from dataflow import ComputePool
from transport import Identity, Link, LinkConfig, Network, Request, TcpNetwork, TransportError

State = Literal["ok", "slow", "broken"]

LEAST_PYTHON = (3, 11)
LEAST_NUMPY = (2, 3, 5)
"""Oldest usable numpy: earlier wheels have a BLAS with wrong transposed products from several threads."""

ROUND_TRIPS = 500
LINK_S = 10.0
"""Deadline in seconds for checking the loopback link."""

PRODUCTS = 32
"""Number of matrix products per thread in the check of concurrent products."""

KERNELS_S = 0.3
"""Duration in seconds of measuring each set of kernels, after a warm-up."""

DRAWN_IMAGES = 256
RATE = 1e-4
"""Learning rate of the measured steps, so small that the weights hardly change."""

EXTRAS = (
    ("numba", "fast", "without it numpy computes the layers"),
    ("threadpoolctl", "fast", "without it the threads of BLAS cannot be seen here"),
    ("ml-dtypes", "fast", "without it tensors of bfloat16 cannot travel"),
    ("cyclopts", "cli", "the command line needs it"),
    ("rich", "cli", "the command line needs it, and the live table"),
    ("asyncssh", "ssh", "`launch ssh` needs it"),
    ("ray", "ray", "`launch ray` needs it"),
)
"""Optional packages, each with its extra and what follows if it is absent or used."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor."""

    state: State
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.state:<6}  {self.what:<13}  {self.detail}"


async def examine(
    *,
    disk: Disk,
    entropy: Callable[[int], bytes],
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    spec: ModelSpec | None = None,
    images_per_group: int = 16,
) -> list[Finding]:
    """Check all requirements of a run. The checks take a few seconds, and download nothing.

    Args:
        entropy: Random bytes for the handshake of the loopback link.
        spec: Model used to check kernels and working sets; None: `mnist-adam`.

    A cancellation leaves no files or tasks.
    """
    machine = describe_machine(loop=type(asyncio.get_running_loop()).__module__)
    spec = spec or named_model("mnist-adam")
    return [
        *check_software(machine),
        *[check_extra(*extra) for extra in EXTRAS],
        *check_hardware(machine),
        await check_kernels(spec, images_per_group, installed=installed_version("numba") is not None),
        *check_working_sets(machine, spec, images_per_group),
        await check_products(machine.cores),
        await check_link(
            TcpNetwork(token=None, entropy=entropy, rules=role_table(), config=LinkConfig(link="auto"))
        ),
        await check_data(disk, data_dir, cache_dir),
    ]


def exit_code(findings: list[Finding]) -> int:
    """Return 0 if runs work here, 1 if a finding is broken."""
    return int(any(finding.state == "broken" for finding in findings))


def check_software(machine: Machine) -> list[Finding]:
    """Check Python, numpy and its BLAS."""
    return [
        _at_least("python", machine.python, LEAST_PYTHON),
        _at_least("numpy", machine.numpy, LEAST_NUMPY),
        _blas(machine),
    ]


def _at_least(what: str, version: str, least: tuple[int, ...]) -> Finding:
    numbers = tuple(int(part) for part in version.split(".")[: len(least)] if part.isdigit())
    if numbers >= least:
        return Finding("ok", what, version)
    wanted = ".".join(map(str, least))
    return Finding("broken", what, f"{version} is too old: install {wanted} or newer")


def _blas(machine: Machine) -> Finding:
    blas = machine.blas
    if machine.warnings:
        return Finding("slow", "blas", f"{blas.name}: {machine.warnings[0]}")
    threads = "threads unknown" if blas.threads is None else f"{blas.threads} thread per product"
    return Finding("ok", "blas", f"{blas.name}, {threads}; the command line sets one")


def check_extra(package: str, extra: str, purpose: str) -> Finding:
    """Check an optional package."""
    version = installed_version(package)
    if version is not None:
        return Finding("ok", package, f"{version} (extra {extra})")
    return Finding("ok", package, f"not installed: {purpose}; {install_command(extra)}")


def check_hardware(machine: Machine) -> list[Finding]:
    """Check cores, caches and memory."""
    cores = f"{machine.cores} cores for this process, {machine.processor}"
    return [
        Finding("ok", "cores", cores)
        if machine.cores > 1
        else Finding("slow", "cores", f"{cores}: the event loop shares it with training"),
        Finding(
            "ok",
            "caches",
            f"second level {_kib(machine.l2_kb)} per core, third level {_kib(machine.l3_kb)} shared",
        ),
        _nodes(machine),
        Finding("ok", "memory", "unknown" if machine.memory_mb is None else f"{machine.memory_mb:,} MiB"),
    ]


def _nodes(machine: Machine) -> Finding:
    if machine.memory_nodes == 1:
        return Finding("ok", "memory nodes", "1: all memory is equally near")
    return Finding(
        "ok", "memory nodes", f"{machine.memory_nodes}: numactl --cpunodebind keeps a worker to one of them"
    )


def _kib(size: int | None) -> str:
    return "unknown" if size is None else f"{size:,} KiB"


async def check_kernels(spec: ModelSpec, images_per_group: int, *, installed: bool) -> Finding:
    """Measure the kernels: each set trains for a moment, on one thread.

    Kernels that are not compiled are not measured, because compiling takes too long here.
    """
    plain = await _images_per_s(spec, images_per_group, "numpy")
    trains = f"{spec.name} at {images_per_group} images per group on one thread"
    if not installed:
        return Finding(
            "slow",
            "kernels",
            f"numpy: {plain:,.0f} images/s of {trains}; compiled kernels are faster: "
            f"{install_command('fast')}",
        )
    network = NeuralNetwork(spec, kernels="auto")
    network.use_ready()
    folder = kernel_folder()
    if not KernelCache(folder).is_kept:
        return Finding(
            "slow",
            "kernels",
            f"numba, but {folder} cannot be written to: each run compiles kernels again, in memory; "
            f"{VARIABLE} can name another folder; numpy: {plain:,.0f} images/s of {trains}",
        )
    if network.kernels == "numpy":
        return Finding(
            "ok",
            "kernels",
            f"numba, not all compiled in {folder} yet: runs compile them while they train, once, and "
            "adam-async train --kernels numba compiles all before it trains; "
            f"numpy: {plain:,.0f} images/s of {trains}",
        )
    fast = await _images_per_s(spec, images_per_group, "numba")
    share = fast * NeuralNetwork(spec).operations / await measure_sgemm(1)
    return Finding(
        "ok",
        "kernels",
        f"numba, compiled in {folder}: {fast:,.0f} images/s of {trains}; numpy {plain:,.0f}, "
        f"{plain / fast:.2f} of that; {share:.2f} of the rate of matrix products",
    )


async def _images_per_s(spec: ModelSpec, images_per_group: int, kernels: str) -> float:
    network = NeuralNetwork(spec, kernels=kernels)
    count = max(DRAWN_IMAGES, images_per_group)
    drawn = Dice(1).bits("images", count=count * prod(spec.input_shape))
    images = (drawn >> np.uint64(56)).astype(np.uint8).reshape(count, *spec.input_shape)
    # Zero is a valid label for every loss, because each has at least one class.
    labels = np.zeros(count, np.int64)
    async with ComputePool(threads=1, name="doctor") as pool:
        await pool.run(network.warm_up)
    return await measure(
        network,
        Sgd(),
        rate=RATE,
        images=images,
        labels=labels,
        group_images=images_per_group,
        threads=1,
        seconds=KERNELS_S,
        warm_up_s=KERNELS_S / 4,
    )


def check_working_sets(machine: Machine, spec: ModelSpec, images_per_group: int) -> list[Finding]:
    """Report the memory that a group uses, part by part, and the smallest cache with room for it."""
    network = NeuralNetwork(spec, kernels="auto")
    found = []
    for each in working_sets(network, images_per_group):
        level = each.fits(l2_kb=machine.l2_kb, l3_kb=machine.l3_kb)
        held = {"memory": "more than the caches", None: "caches unknown"}.get(level, f"within {level}")
        found.append(Finding("ok", "working set", f"{held}: {each}"))
    return found


async def check_products(threads: int) -> Finding:
    """Run A @ B.T in several threads at once; each result must equal a single thread's.

    A BLAS that is not thread-safe gives wrong numbers here, and would spoil training without an error.
    """
    threads = max(threads, 2)
    dice = Dice(1)
    pairs = [
        (
            dice.normal("a", keys=(number,), count=200 * 300).reshape(200, 300),
            dice.normal("b", keys=(number,), count=160 * 300).reshape(160, 300),
        )
        for number in range(threads)
    ]
    alone = [a @ b.T for a, b in pairs]
    async with ComputePool(threads=threads, name="doctor") as pool, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(pool.run(_worst_error, a, b, wanted), name=f"doctor/product-{number}")
            for number, ((a, b), wanted) in enumerate(zip(pairs, alone, strict=True))
        ]
    worst = max(task.result() for task in tasks)
    if worst <= 1e-5:
        return Finding("ok", "products", f"A @ B.T from {threads} threads equals the serial one")
    return Finding(
        "broken",
        "products",
        f"A @ B.T from {threads} threads differs from the serial one by {worst:.1e} of its size: "
        "this BLAS is not safe with threads; install numpy 2.3.5 or newer from PyPI",
    )


def _worst_error(a: NDArray[np.floating], b: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    """Return the largest error of repeated products, relative to the largest value; infinite for a NaN."""
    errors = [float(np.abs(a @ b.T - wanted).max()) for _ in range(PRODUCTS)]
    return max(error if np.isfinite(error) else np.inf for error in errors) / float(np.abs(wanted).max())


async def check_link(network: Network, address: str = "tcp://127.0.0.1:0") -> Finding:
    """Bind an address, connect to it, and time requests of one small message each."""
    server = Identity(role="controller", node="doctor-controller", incarnation=1)
    client = Identity(role="driver", node="doctor", incarnation=1)

    async def on_link(link: Link) -> None:
        link.serve(_answer, receives=False)
        await link.wait_closed()

    loop = asyncio.get_running_loop()
    try:
        async with (
            asyncio.timeout(LINK_S),
            network.listen(address, server, on_link) as listener,
            network.connect(listener.address, client, timeout_s=LINK_S) as link,
        ):
            await link.call(pack(GetMap()), timeout_s=LINK_S)
            begin = loop.time()
            for _ in range(ROUND_TRIPS):
                await link.call(pack(GetMap()), timeout_s=LINK_S)
            took_s = loop.time() - begin
            shares = "share memory, and train in place" if link.shares else "use TCP: see --link"
    except (OSError, TransportError, TimeoutError) as error:
        reason = str(error) or f"no answer within {LINK_S:g} s"
        return Finding("broken", "link", f"{address} cannot be used: {reason}")
    return Finding(
        "ok",
        "link",
        f"{listener.address} can be bound; a request and its answer take {took_s / ROUND_TRIPS * 1e6:.0f} "
        f"us; processes of this host {shares}",
    )


def _answer(request: Request) -> None:
    request.reply(pack(MapState(version=0, group=""), [text_tensor({})]))


async def check_data(disk: Disk, data_dir: Path | None, cache_dir: Path | None) -> Finding:
    """Load the data of ``--data auto`` without a network."""
    try:
        dataset = await load_dataset("auto", disk, data_dir=data_dir, cache_dir=cache_dir)
    except DataError as error:
        return Finding("broken", "data", str(error))
    sizes = f"{len(dataset.train_labels):,} training and {len(dataset.test_labels):,} test images"
    return Finding("ok", "data", f"{dataset.name}, {sizes}: {dataset.source}")
