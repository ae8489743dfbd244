"""The connection of this process to a Ray cluster, with the thread of Ray's blocking calls."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, Self

from adam_async.errors import ConfigError, DeadlineExceeded, RoleUnreachable, install_command
from adam_async.runtime.blocking_thread import BlockingThread
from adam_async.runtime.child_process import child_environment
from adam_async.runtime.clock import Within

logger = logging.getLogger(__name__)

OLDEST = (2, 60)
"""Oldest version of Ray that the tests of this package use."""

CONNECT_S = 20.0
"""Deadline of an attempt to join a Ray cluster, in seconds."""

START_S = 60.0
"""Deadline of the start or the end of a Ray cluster of this process, in seconds."""

CALL_S = 30.0
"""Deadline of a call to the head node of Ray, in seconds."""

STORE_BYTES = 80 << 20
"""Memory for objects of a Ray cluster of this process, in bytes: near Ray's minimum, because the roles put no
objects there."""


class RayConnection:
    """Joins a Ray cluster, or starts one: `async with RayConnection("auto", entropy) as ray`.

    If the program has joined a cluster before the block, the block uses that connection with ``auto``, and
    keeps it open.

    Args:
        address: See `RaySettings.address`.
        entropy: Random bytes for the token of a cluster of its own.

    Raises:
        ConfigError: Ray is missing or too old, the cluster refuses this process, or the program has joined
            another cluster.
        RoleUnreachable: The address does not answer.
    """

    def __init__(self, address: str, entropy: Callable[[int], bytes]) -> None:
        self.address = address
        self._entropy = entropy
        self._thread = BlockingThread("ray")
        self._owns = False

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            self._thread.end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            if self._owns:
                await self.call("Ray to end", require_ray().shutdown, timeout_s=START_S)
        finally:
            self._thread.end()

    async def call(
        self,
        what: str,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = CALL_S,
        **named: Any,
    ) -> Any:
        """Call a blocking function of Ray on the thread, and return its result.

        Raises:
            DeadlineExceeded: The call took too long; it goes on, and further calls wait for it.
        """
        loop = asyncio.get_running_loop()
        async with Within(timeout_s, what):
            return await loop.run_in_executor(self._thread, partial(function, *arguments, **named))

    async def _open(self) -> None:
        if "ray" not in sys.modules:  # Ray reads these variables at its import
            for name, value in self._variables().items():
                os.environ.setdefault(name, value)
        ray = await self.call("the import of Ray", require_ray)
        if ray.is_initialized():
            if self.address != "auto":
                raise ConfigError(
                    f"this program has joined the Ray cluster at {ray.get_runtime_context().gcs_address}, "
                    f"and --address is {self.address}: give auto to use it"
                )
            return
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.address == "local":
            options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        else:
            options["address"] = await self._probe()
        # Set first: a failed start may leave processes.
        self._owns = True
        try:
            await self.call("Ray to start", ray.init, timeout_s=START_S, **options)
        except BaseException:
            with suppress(DeadlineExceeded):  # the start that takes too long has the only thread
                await self.call("Ray to end", ray.shutdown, timeout_s=START_S)
            raise

    def _variables(self) -> dict[str, str]:
        """Return settings of Ray for a program that uses Ray only for this launch."""
        # Ray would print the losses of nodes, which this launch reports by their roles.
        quiet = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
        if self.address != "local":
            return quiet
        # Ray listens on all interfaces and runs any code of its peers.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._entropy(32).hex()}
        return {**quiet, **token, "RAY_USAGE_STATS_ENABLED": "0"}

    async def _probe(self) -> str:
        """Try to join the cluster from a child process, and return the address of its head node."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "adam_async.launch.ray_probe", self.address),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(os.environ),
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                printed, _ = await child.communicate()
        except TimeoutError:
            why = f"no answer within {CONNECT_S:g} s; try `ray status --address {self.address}`"
            raise RoleUnreachable("Ray", self.address, why) from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        word, _, rest = (printed.decode(errors="replace").strip().splitlines() or [""])[-1].partition(" ")
        if word != "joined":
            raise ConfigError(refusal_text(self.address, rest or f"exit code {child.returncode}"))
        return rest

    def __repr__(self) -> str:
        return f"<RayConnection {self.address}>"


def require_ray() -> Any:
    """Import Ray.

    Raises:
        ConfigError: Ray is not installed, or older than `OLDEST`.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"launch ray needs Ray, of the extra `ray`: {install_command('ray')}") from None
    check_ray(version("ray"))
    return ray


def check_ray(found: str) -> None:
    """Check the version of Ray.

    Raises:
        ConfigError: The version is older than `OLDEST`.
    """
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in found.split(".")[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"this Python has Ray {found[:40]}, older than {oldest}: {install_command('ray')} --upgrade "
            "on all nodes"
        )


def refusal_text(address: str, why: str) -> str:
    """Return the reason that this process cannot join a cluster, with the remedy."""
    if "Could not find any running Ray" in why:
        cure = (
            "start one with `ray start --head`, give its HOST:PORT, or give local for a Ray of this command"
        )
    elif "ersion mismatch" in why:
        cure = "install the same versions of Ray and Python on this machine and on all nodes"
    else:
        cure = f"make this machine a node: `ray start --address={address}`"
    return f"cannot join Ray at --address {address}: {why[:300]}; {cure}"
