"""Containers of manifests on this machine: their commands, variables and volumes, in namespaces.

A pod gets its own host name, ``/etc/hosts`` with the names of its Services, its volumes below ``/srv``, a
read-only root file system and no capability. All pods share the network of the machine; each has an address
of loopback. Without root on this machine, they run as the test's own user instead of that of the manifest.
"""

import http.client
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helm import Manifest
from tests.processes.commands import ROOT, Command

OWN_ROOT = () if os.geteuid() == 0 else ("--map-root-user",)
NAMESPACES = ("unshare", *OWN_ROOT, "--mount", "--uts", "--propagation", "private")


def skip_without_namespaces() -> None:
    """Skip a test, with the system's reason, if this user can make no namespaces."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("needs unshare and setpriv of util-linux")
    tried = subprocess.run(
        [*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/srv"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"needs root, or namespaces of users, for mounts: {tried.stderr.strip()}")


def opened_folders() -> list[str]:
    """Lines of a script that let another user reach the code, if a folder above it is closed to others.

    A closed folder gets an empty file system, into which only the code is mounted.
    """
    first, second = [], []
    for number, folder in enumerate((Path(sys.base_prefix), Path(sys.prefix), ROOT)):
        closed = next((one for one in reversed(folder.parents) if not one.stat().st_mode & 0o001), None)
        if closed is not None:
            first += [
                f"mkdir -p /srv/code/{number}",
                f"mount --bind {shlex.quote(str(folder))} /srv/code/{number}",
            ]
            empty = f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed))}"
            second += [] if empty in second else [empty]
            target = shlex.quote(str(folder))
            second += [f"mkdir -p {target}", f"mount --bind /srv/code/{number} {target}"]
    return [*first, *second]


class Cluster:
    """The objects of manifests, and pods of them.

    Args:
        items: All objects.
        folder: Folder for volumes.
    """

    def __init__(self, items: list[Manifest], folder: Path) -> None:
        self.items = items
        self._folder = folder
        self._number = 0
        self._network = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        (folder / "bin").mkdir()
        program = folder / "bin" / "adam-async"
        words = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m adam_async"
        program.write_text(f'#!/bin/sh\n{words} "$@"\n')
        program.chmod(0o755)

    def object(self, kind: str, name: str) -> Manifest:
        (found,) = (one for one in self.items if one["kind"] == kind and one["metadata"]["name"] == name)
        return found

    def address(self, pod: str, service: str = "") -> str:
        """Give an address to a pod; with a Service the address has a name."""
        self._number += 1
        address = f"{self._network}.{self._number}"
        with self._hosts.open("a") as hosts:
            hosts.write(f"{address} {pod}{f' {pod}.{service}' if service else ''}\n")
        return address

    def pods(self, kind: str, name: str) -> list["Pod"]:
        """Return the pods of a StatefulSet, a Deployment or a Job."""
        owner = self.object(kind, name)
        spec = owner["spec"]
        ordinals = kind == "StatefulSet"
        count = spec.get("replicas", 1)
        names = [f"{name}-{number}" if ordinals else f"{name}-5d9f7c-{number}x2b4" for number in range(count)]
        return [
            Pod(self, one, spec["template"]["spec"], self.address(one, spec.get("serviceName", "")))
            for one in names
        ]

    def volume(self, pod: str, name: str, source: Manifest | None) -> Path:
        """Return the folder of a volume; a claim outlives its pod."""
        folder = (
            self._folder
            / (pod if source is None or "persistentVolumeClaim" not in source else "claims")
            / name
        )
        folder.mkdir(parents=True, exist_ok=True)
        if source is not None and "configMap" in source:
            data = self.object("ConfigMap", source["configMap"]["name"])["data"]
            for key, text in data.items():
                (folder / key).write_text(text)
        return folder

    @property
    def hosts(self) -> Path:
        return self._hosts

    @property
    def programs(self) -> Path:
        return self._folder / "bin"


class Pod:
    """One pod: its only container's command, as written."""

    def __init__(self, cluster: Cluster, name: str, spec: Manifest, address: str) -> None:
        self.name, self.address = name, address
        self._cluster, self._spec = cluster, spec
        (self._container,) = spec["containers"]

    def environment(self) -> dict[str, str]:
        fields = {"metadata.name": self.name, "status.podIP": self.address}

        def value(entry: Manifest) -> str:
            source = entry.get("valueFrom")
            if source is None:
                return str(entry["value"])
            if "fieldRef" in source:
                return fields[source["fieldRef"]["fieldPath"]]
            secret = source["secretKeyRef"]
            return str(self._cluster.object("Secret", secret["name"])["stringData"][secret["key"]])

        return {entry["name"]: value(entry) for entry in self._container["env"]}

    def words(self) -> list[str]:
        """The command, with the variables put in as Kubernetes does."""
        words: list[str] = []
        for word in self._container["command"]:
            for name, value in self.environment().items():
                word = word.replace(f"$({name})", value)
            words.append(word)
        return words

    def _script(self) -> str:
        """A script that makes the file system of the container, and becomes its process."""
        user = self._spec["securityContext"]["runAsUser"]
        is_root = os.geteuid() == 0
        sources = {volume["name"]: volume for volume in self._spec["volumes"]}
        lines = [f"hostname {self.name}"]
        lines += [f"mount --bind {self._cluster.hosts} /etc/hosts", "mount -t tmpfs tmpfs /srv"]
        mounts = [(str(self._cluster.programs), "/srv/bin", True)]
        for mount in self._container["volumeMounts"]:
            folder = self._cluster.volume(self.name, mount["name"], sources.get(mount["name"]))
            if is_root:
                shutil.chown(folder, user, user)
            mounts.append((str(folder), mount["mountPath"], mount.get("readOnly", False)))
        for source, target, is_fixed in mounts:
            lines += [f"mkdir -p {target}", f"mount --bind {shlex.quote(source)} {target}"]
            lines += [f"mount -o remount,ro,bind {target}"] if is_fixed else []
        lines += opened_folders() if is_root else []
        assert self._container["securityContext"]["readOnlyRootFilesystem"]
        lines += ["mount -o remount,ro,bind /srv", "mount -o remount,ro,bind /"]
        lines.append(f"cd {self._container['workingDir']}")
        assert self._container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        drop = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        if is_root:
            drop += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        variables = {**self.environment(), "PATH": f"/srv/bin:{os.environ['PATH']}"}
        given = [f"{name}={value}" for name, value in variables.items()]
        lines.append(f"exec {shlex.join([*drop, 'env', '-i', *given, *self.words()])}")
        return "\n".join(["set -e", *lines])

    def start(self) -> Command:
        """Start the container."""
        return Command.of([*NAMESPACES, "sh", "-c", self._script()], folder=self._cluster.programs)

    def probe(self, name: str) -> int:
        """Return the status of a probe; 0 if nothing listens."""
        probe = self._container[name]["httpGet"]
        (port,) = (one for one in self._container["ports"] if one["name"] == probe["port"])
        link = http.client.HTTPConnection(self.address, port["containerPort"], timeout=10)
        try:
            link.request("GET", probe["path"])
            return link.getresponse().status
        except OSError:
            return 0
        finally:
            link.close()
