"""The option `--health`: probes of a command over HTTP."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from adam_async.errors import BindFailed, first_cause
from adam_async.run.addresses import check_address
from adam_async.runtime.health import Health, health_endpoint
from transport.sockets import parse_tcp_address


async def with_health(address: str | None, work: Callable[[Health], Awaitable[int]]) -> int:
    """Run a command, answer probes at `address` until it ends, and return its exit code.

    Raises:
        BindFailed: The address is not available.
        ConfigError: The address is not ``tcp://host:port``.
    """
    health = Health()
    if address is None:
        return await work(health)
    host, port = parse_tcp_address(check_address(address, "--health", everywhere=True))
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(health_endpoint(host, port, health))
        except (OSError, ExceptionGroup) as error:
            cause = first_cause(error)
            if isinstance(cause, OSError):
                why = (cause.strerror or str(cause)).split("): ")[-1]
                raise BindFailed(address, why, remedy="choose another with --health") from None
            raise
        return await work(health)


async def with_serving(address: str | None, work: Callable[[], Awaitable[int]]) -> int:
    """Run a command that is ready as long as it runs. See `with_health`."""

    async def ready(health: Health) -> int:
        """Run the command; its health is ready until the command ends, and then draining."""
        health.follow(lambda: "")
        try:
            return await work()
        finally:
            health.drain()

    return await with_health(address, ready)
