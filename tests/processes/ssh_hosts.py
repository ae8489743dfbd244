"""Hosts for tests: private SSH servers on loopback addresses, each with its own key and process group.

The servers have their own configuration, keys and log in a folder of the test, and accept one key of it.
"""

import getpass
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.processes.commands import ROOT, descendants, kill_all, until

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else "")

PRIVSEP = Path("/run/sshd")
"""Empty folder that an SSH server of root requires."""


def missing() -> str:
    """Return the reason that these tests cannot run; empty if they can."""
    if importlib.util.find_spec("asyncssh") is None:
        return "asyncssh is not installed: pip install 'adam-async[ssh]'"
    if not SSHD or not shutil.which("ssh-keygen"):
        return "there is no sshd: apt-get install openssh-server"
    return "" if sys.platform == "linux" else "only Linux has all addresses of 127.0.0.0/8"


def make_key(file: Path) -> str:
    """Make a key pair without a passphrase; returns the public key."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file.with_name(f"{file.name}.pub").read_text().strip()


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


class SshHost:
    """An SSH server on a loopback address, as a context manager; `kill` ends it and all that it started."""

    def __init__(self, address: str, folder: Path, client_key: str) -> None:
        self.address = address
        self.port = free_port(address)
        own = folder / address
        own.mkdir()
        self.public_key = make_key(own / "host_key")
        (own / "authorized_keys").write_text(f"{client_key}\n")
        config = {
            "ListenAddress": address,
            "Port": self.port,
            "HostKey": own / "host_key",
            "AuthorizedKeysFile": own / "authorized_keys",
            "PidFile": own / "pid",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "yes",
            "MaxStartups": "100",
        }
        (own / "config").write_text("".join(f"{name} {value}\n" for name, value in config.items()))
        self._config, self._log = own / "config", own / "log"
        if os.getuid() == 0:
            PRIVSEP.mkdir(mode=0o755, exist_ok=True)

    def __enter__(self) -> "SshHost":
        command = [SSHD, "-D", "-e", "-f", self._config]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        until(lambda: "Server listening" in self._log.read_text(), f"sshd on {self.address}")
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def processes(self) -> list[int]:
        """Return the server and all its descendants, also those that left its process group."""
        return descendants(self._process.pid)

    def kill(self) -> None:
        """Kill the server and all its descendants, as the loss of the host would."""
        kill_all(self.processes())
        self._process.wait()

    def known(self) -> str:
        """Return the host's line of a file of known hosts."""
        return f"[{self.address}]:{self.port} {self.public_key}\n"

    def table(self, **more: object) -> str:
        """Return the host's table of a file of hosts."""
        values = {"name": self.address, "port": self.port, **more}
        return "[[hosts]]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in values.items())


def toml(value: object) -> str:
    """Return a number, text or list of texts in TOML."""
    return repr(value).replace("'", '"')


def hosts_file(
    folder: Path,
    *tables: str,
    key: Path,
    known: str,
    command: list[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Write a file of hosts that run the package of this checkout."""
    (folder / "known_hosts").write_text(known)
    defaults = {
        "user": getpass.getuser(),
        "key": str(key),
        "known_hosts": str(folder / "known_hosts"),
        "command": command or [sys.executable, "-P", "-m", "adam_async"],
    }
    text = "".join(f"{name} = {toml(value)}\n" for name, value in defaults.items())
    file = folder / "hosts.toml"
    variables = {"PYTHONPATH": str(ROOT), **(environment or {})}
    text += "[environment]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in variables.items())
    file.write_text(text + "".join(tables))
    return file
