"""Roles on other hosts over SSH, as a launcher: `async with SshLauncher(hosts) as launcher`.

Each role is a command in a session with its own connection. A role's orders, with its keys, are the first
line on its stdin, which then stays open. The role ends when its stdin closes (see `cluster/parent_pipe.py`).
The SSH server closes the stdin at the end of the connection, and so after any end of the launching process.
The end of the connection also ends the session's process on the host, and on Linux the kernel then kills the
role.

A role whose connection breaks starts again on another host that may have it (see `launch/hosts.py`), unless
it is one of several controllers. asyncssh, of the extra `ssh`, checks each host's key.

A launch records the folders that controllers use on hosts, so that another launch removes those of a killed
one. The record of a launch is a file on the launching machine. The record's name is the state folder's name,
and its lines are the hosts that may have the folder. The launch holds the file's lock until it ends, and the
operating system releases a killed process's lock. So if a record's lock is free, no controller needs the
folder.
"""

import asyncio
import logging
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from adam_async.cluster.launcher import RoleSpec
from adam_async.errors import AdamError, ConfigError, RoleUnreachable, first_cause, install_command
from adam_async.launch.hosts import Host, Hosts, Placement, SshSettings, roles_by_host
from adam_async.launch.settings import Training
from adam_async.run.config import Config
from adam_async.run.memory_sizes import asked_bytes, check_room, read_memory
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.kernel_cache import user_cache
from adam_async.runtime.role_handle import CUT_OFF, RemoteRole
from transport import Identity, Network

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection
import re
from contextlib import AsyncExitStack

MOST_RECORD_BYTES = 1 << 20
"""Maximum size of a record, in bytes."""

_NAME = re.compile(r"[0-9a-f]{8,64}")


class StateRecords:
    """The records of the launches from this machine.

    Args:
        folder: Folder of the records, made if missing.
        disk: The disk.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    @asynccontextmanager
    async def held(self, name: str, hosts: Sequence[str]) -> AsyncIterator[None]:
        """Write a record of this launch, and hold its lock. A record that cannot be written causes a warning.

        Args:
            name: Name of the state folder, in hexadecimal digits.
            hosts: Names of the hosts that may have the folder.
        """
        path = self._folder / name
        # The file gets its name after its lock, so that no other launch treats the record as an ended one.
        made = self._folder / f".{name}"
        async with AsyncExitStack() as stack:
            try:
                await self._disk.write_atomic(made, [_text(hosts)])
                await stack.enter_async_context(self._disk.hold(made))
                await self._disk.rename(made, path)
            except OSError as error:
                logger.warning(
                    "no record in %s (%s): if this process is killed, the state of its controllers stays on "
                    "their hosts; set XDG_CACHE_HOME to a writable folder",
                    self._folder,
                    error,
                )
            yield

    async def ended(self) -> Mapping[str, tuple[str, ...]]:
        """Return the hosts of each record whose launch has ended, by the name of the state folder."""
        found: dict[str, tuple[str, ...]] = {}
        names: list[str] = []
        with suppress(OSError):  # no folder before the first record
            names = await self._disk.names(self._folder)
        for name in names:
            path = self._folder / name
            # A name with other characters could make a host remove another folder.
            if not _NAME.fullmatch(name):
                continue
            # An error means that the launch still runs, or that another launch removes the record.
            with suppress(OSError, UnicodeDecodeError):
                async with self._disk.hold(path):
                    lines = await self._disk.read_part(path, 0, MOST_RECORD_BYTES)
                    found[name] = tuple(lines.decode().split("\n")[:-1])
        return found

    async def leave(self, name: str, hosts: Sequence[str]) -> None:
        """Reduce a record to these hosts; without hosts remove the record."""
        path = self._folder / name
        try:
            if hosts:
                await self._disk.write_atomic(path, [_text(hosts)])
            else:
                await self._disk.remove_file(path)
        except OSError as error:
            logger.warning("record %s cannot be changed, so a later launch reads it again: %s", path, error)

    def __repr__(self) -> str:
        return f"<StateRecords in {self._folder}>"


def _text(hosts: Sequence[str]) -> bytes:
    return "".join(f"{host}\n" for host in hosts).encode()


logger = logging.getLogger(__name__)

CONNECT_S = 15.0
"""Deadline in seconds of a connection to a host, including the login."""

CHECK_S = 60.0
"""Deadline of `adam-async --version` on a host, in seconds."""

START_S = 15.0
"""Deadline for the start of a role's command on a host with an open connection, in seconds."""

REMOVE_S = 15.0
"""Deadline in seconds for removing a state folder on one host."""

KEEPALIVE_S = 5.0
"""Seconds between two keepalive requests to a silent host; three without an answer end the connection."""

BEAT_S = 5.0
"""Seconds between two empty lines on the stdin of a role."""

SILENCE_S = 30.0
"""Seconds without a byte on its stdin after which a role ends, because the launching machine counts as
lost."""

CONNECTING = 4
"""Maximum number of concurrent logins; an SSH server may refuse some of ten concurrent logins."""

SIZES = "getconf _NPROCESSORS_ONLN && (getconf _PHYS_PAGES || echo 0) && getconf PAGE_SIZE"
"""Shell command that prints the number of cores, the number of memory pages (0 if unknown), and the page size
in bytes."""

STATE = ".cache/adam-async/launch"
"""Folder for the controllers' state, in the home folder of the login."""


class SshLauncher:
    """Starts roles on hosts.

    Args:
        hosts: The hosts, and how to run the package there.
        records: Folder on this machine with the records of the state on hosts (see `StateRecords`).
        entropy: Random bytes for the ports of controllers.

    `async with` logs in to each host once, and checks its package.

    Raises:
        ConfigError: asyncssh is missing; the key of a host is unknown or has changed; a host refuses the
            login, lacks the package, or has another version.
        RoleUnreachable: A host does not answer, or its connection breaks.
    """

    silence_s = SILENCE_S

    def __init__(self, hosts: Hosts, *, records: Path, entropy: Callable[[int], bytes]) -> None:
        self.hosts = hosts
        self._records = records
        self.placement = Placement(hosts.hosts)
        self.cores: dict[str, int] = {}
        self.memory: dict[str, int] = {}
        """Memory of each host in bytes; 0 if its system does not report it."""
        self._entropy = entropy
        self._logins = asyncio.Semaphore(CONNECTING)

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as group:
                for host in self.hosts.hosts:
                    group.create_task(self._check(host), name=f"launch/{host.name}")
        except ExceptionGroup as errors:
            raise first_cause(errors) from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Do nothing: each role ends with its task."""

    def start(self, spec: RoleSpec, group: asyncio.TaskGroup, on_line: Callable[[str], None]) -> "SshRole":
        """Start a role on its host, or on another host if its host is lost. See `Launcher.start`."""
        host = self.placement.place(spec.role, spec.node, moves=not has_peers(spec))
        role = SshRole(self, host, spec, on_line)
        group.create_task(role.run(), name=f"launch/{spec.node}")
        return role

    async def prepare(self, config: Config, *, data_servers: int) -> int:
        """Check the memory of the hosts; return the threads that the options name. See `Launcher.prepare`."""
        memory = read_memory(config.memory)
        for name, roles in roles_by_host(config, self.hosts.hosts, data_servers=data_servers).items():
            if (available := self.memory.get(name, 0)) > 0:
                check_room(f"host {name}", asked_bytes(memory, roles), available)
        return 1 if config.record else config.threads

    async def controller_addresses(
        self, nodes: Sequence[str], network: Network, driver: Identity
    ) -> list[str]:
        """Return addresses on the controllers' hosts; several controllers get ports drawn at random."""
        return self.placement.controller_addresses(nodes, self._entropy)

    @asynccontextmanager
    async def state_folder(self, name: str) -> AsyncIterator[str]:
        """Yield the folder with the controllers' state on their hosts, and remove it at the end.

        The block also removes folders of earlier launches that were killed, or whose hosts did not answer. A
        host that does not answer keeps its folder until the next launch.
        """
        hosts = [host for host in self.hosts.hosts if "controller" in host.roles]
        async with Disk(name="records") as disk:
            records = StateRecords(self._records, disk)
            for ended, names in (await records.ended()).items():
                here = [host for host in hosts if host.name in names]
                kept = await self._remove(here, ended)
                away = [name for name in names if name not in {host.name for host in hosts}]
                await records.leave(ended, [*kept, *away])
            async with records.held(name, [host.name for host in hosts]):
                try:
                    yield f"{STATE}/{name}"
                finally:
                    await records.leave(name, await self._remove(hosts, name))

    def command(self, host: Host, words: Sequence[str], environment: Mapping[str, str]) -> str:
        """Return the command line of a role for the shell of its host."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        begin = f"env {shlex.join(variables)} " if variables else ""
        return f"exec {begin}{self.hosts.command_of(host)} {shlex.join(words)}"

    @asynccontextmanager
    async def connected(self, host: Host) -> "AsyncIterator[SSHClientConnection]":
        """Yield a connection to a host; the end of the block cuts the connection.

        Raises:
            ConfigError: The host's key is not the known one, the host refuses the login, or the user's key is
                unusable.
            RoleUnreachable: The host does not answer.
        """
        ssh = require_asyncssh()
        options: dict[str, Any] = {"keepalive_interval": KEEPALIVE_S, "keepalive_count_max": 3}
        hosts = self.hosts
        options |= {"port": host.port or hosts.port} if host.port or hosts.port else {}
        options |= {"username": host.user or hosts.user} if host.user or hosts.user else {}
        options |= {"known_hosts": hosts.known_hosts} if hosts.known_hosts else {}
        options |= {"client_keys": [hosts.key]} if hosts.key else {}
        async with self._logins:
            try:
                async with asyncio.timeout(CONNECT_S):
                    connection = await ssh.connect(host.name, **options)
            except ssh.HostKeyNotVerifiable:
                raise ConfigError(_key_text(host, hosts)) from None
            except ssh.PermissionDenied as error:
                raise ConfigError(
                    f"host {host.name} refuses the login: {error.reason}; try `ssh {host.name}`, then give "
                    "user and key in the file of hosts"
                ) from None
            except ssh.KeyImportError as error:
                raise ConfigError(f"key {hosts.key} cannot be used: {error}") from None
            except TimeoutError:
                self.placement.note(host, answers=False)
                raise _unreachable(host, hosts, f"no answer within {CONNECT_S:g} s") from None
            except (OSError, ssh.Error) as error:
                self.placement.note(host, answers=False)
                why = getattr(error, "strerror", None) or str(error)
                raise _unreachable(host, hosts, why.split("): ")[-1].lower()) from None
        self.placement.note(host, answers=True)
        try:
            yield connection
        finally:
            connection.abort()
            await connection.wait_closed()

    @asynccontextmanager
    async def answering(self, host: Host, action: str, *, within_s: float) -> AsyncIterator[None]:
        """Bound a block of requests to a host by a deadline, and give its errors the action and the remedy.

        Args:
            host: The host.
            action: Action of the host in the block, an infinitive for the error text.
            within_s: Deadline of the block, in seconds.

        Raises:
            RoleUnreachable: The host does not answer in time, refuses, or its connection breaks.
        """
        ssh = require_asyncssh()
        try:
            async with asyncio.timeout(within_s):
                yield
        except TimeoutError:
            self.placement.note(host, answers=False)
            raise _unreachable(host, self.hosts, f"it did not {action} within {within_s:g} s") from None
        except (OSError, ssh.Error) as error:
            self.placement.note(host, answers=False)
            raise _unreachable(host, self.hosts, f"it did not {action}: {str(error)[:200]}") from None

    async def _check(self, host: Host) -> None:
        """Check the package of a host, and note its cores."""
        command = self.command(host, ("--version",), self.hosts.environment)
        action = f"run {self.hosts.command_of(host)!r}"
        async with self.connected(host) as connection, self.answering(host, action, within_s=CHECK_S):
            # The subshell confines `exec`, so the numbers of cores, pages and bytes of a page follow.
            done = await connection.run(f"({command}) && {SIZES}", check=False)
        words = str(done.stdout).split()
        if done.exit_status or len(words) < 4 or not all(word.isdecimal() for word in words[-3:]):
            lines = str(done.stderr).strip().splitlines() or [f"exit code {done.exit_status}"]
            raise ConfigError(
                f"host {host.name} cannot run {self.hosts.command_of(host)!r}: {lines[-1][:200]}; install "
                "adam-async there, or give its path as command in the file of hosts"
            )
        ours, theirs = version("adam-async"), words[-4]
        if theirs != ours:
            raise ConfigError(
                f"host {host.name} has adam-async {theirs[:40]!r}, and this machine {ours!r}: install the "
                "same version"
            )
        cores, pages, page_bytes = map(int, words[-3:])
        self.cores[host.name], self.memory[host.name] = cores, pages * page_bytes

    async def _remove(self, hosts: Sequence[Host], name: str) -> list[str]:
        """Remove a state folder from hosts; return the names of the hosts that may still have it."""
        async with asyncio.TaskGroup() as group:
            removals = {
                host.name: group.create_task(self._remove_from(host, name), name=f"launch/{host.name}/remove")
                for host in hosts
            }
        return [host for host, removal in removals.items() if not removal.result()]

    async def _remove_from(self, host: Host, name: str) -> bool:
        """Remove a state folder from one host; return whether it is gone."""
        folder, action = f"{STATE}/{name}", "remove the state of controllers"
        try:
            async with self.connected(host) as connection, self.answering(host, action, within_s=REMOVE_S):
                done = await connection.run(f"rm -rf -- {shlex.quote(folder)}", check=False)
        except AdamError as error:
            logger.info("host %s keeps %s until the next launch removes it: %s", host.name, folder, error)
            return False
        if done.exit_status:
            logger.warning("host %s keeps %s: %s", host.name, folder, str(done.stderr).strip()[:200])
        return not done.exit_status

    def __repr__(self) -> str:
        return f"<SshLauncher {', '.join(host.name for host in self.hosts.hosts)}>"


async def train(settings: SshSettings, training: Training) -> int:
    """Train with the roles on the hosts. See `SshLauncher`."""
    records = user_cache(training.environment) / "launches"
    return await training.on(SshLauncher(settings.hosts, records=records, entropy=system_entropy))


class SshRole(RemoteRole):
    """One process of a role on a host, in a session with its own connection."""

    def __init__(
        self, launcher: SshLauncher, host: Host, spec: RoleSpec, on_line: Callable[[str], None]
    ) -> None:
        super().__init__(spec.node, on_line)
        self.host = host
        self._launcher = launcher
        self._spec = spec
        self._close_stdin = asyncio.Event()

    async def _session(self) -> int:
        """Log in, start the role, and relay its output. See `RemoteRole._session`."""
        launcher, host, spec = self._launcher, self.host, self._spec
        ssh = require_asyncssh()
        share = max(1, launcher.cores.get(host.name, 1) // max(1, launcher.placement.workers_on(host)))
        words = spec.words(bind=host.listens_on(0, spec.role), threads=share, copies_bind=host.copies_bind)
        command = launcher.command(host, words, {**launcher.hosts.environment, **spec.environment})
        try:
            async with launcher.connected(host) as connection:
                async with launcher.answering(host, f"start {self.node}", within_s=START_S):
                    process = await connection.create_process(command, encoding=None)
                process.stdin.write(spec.orders)
                async with asyncio.TaskGroup() as group:
                    feeding = group.create_task(self._feed(process.stdin), name=f"{self.node}/stdin")
                    try:
                        await self._relay(process.stdout, process.stderr)
                    except* (ssh.Error, OSError):
                        pass  # the missing exit code shows that the connection broke
                    await process.wait_closed()
                    feeding.cancel()
                code: int | None = process.returncode
                if code is not None:
                    return code
                launcher.placement.note(host, answers=False)
                self._cut_off = f"the connection to its host {host.name} broke"
        except (AdamError, ssh.Error, OSError) as error:
            self._cut_off = str(error)
        return CUT_OFF

    async def _feed(self, stdin: Any) -> None:
        """Send the role an empty line every `BEAT_S`, until `end` closes its stdin."""
        with suppress(OSError):  # the role has ended
            while not self._close_stdin.is_set():
                stdin.write(b"\n")
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._close_stdin.wait()
            stdin.write_eof()

    def end(self) -> None:
        """Close the stdin of the role, now or at its start."""
        self._close_stdin.set()

    def __repr__(self) -> str:
        return f"<SshRole {self.node} on {self.host.name}>"


def has_peers(spec: RoleSpec) -> bool:
    """Return whether a role is one of several controllers, whose addresses are final."""
    return "--peers" in spec.arguments


def require_asyncssh() -> Any:
    """Import asyncssh. Raises ConfigError: asyncssh is not installed, or this user has no home folder."""
    try:
        import asyncssh
    except ModuleNotFoundError:
        raise ConfigError(
            f"launch ssh needs asyncssh, of the extra `ssh`: {install_command('ssh')}"
        ) from None
    try:
        Path.home()
    except RuntimeError:
        raise ConfigError("launch ssh reads ~/.ssh, and this user has no home folder: set HOME") from None
    return asyncssh


def _unreachable(host: Host, hosts: Hosts, why: str) -> RoleUnreachable:
    port = host.port or hosts.port
    where = f"{host.name}:{port}" if port else host.name
    return RoleUnreachable(f"host {host.name}", where, f"{why}; try `ssh {host.name}`")


def _key_text(host: Host, hosts: Hosts) -> str:
    port = host.port or hosts.port
    named = f"[{host.name}]:{port}" if port and port != 22 else host.name
    file = f" -f {shlex.quote(hosts.known_hosts)}" if hosts.known_hosts else ""
    scan = f"ssh-keyscan{f' -p {port}' if port and port != 22 else ''} {host.name}"
    known = hosts.known_hosts or "~/.ssh/known_hosts"
    return (
        f"the key of host {host.name} is not one that {known} has for it. If the host is new or was set up "
        f"again: ssh-keygen -R '{named}'{file}, compare what `{scan}` prints with the key on the host, and "
        "add it to the file. If not, another machine answers in its place"
    )
