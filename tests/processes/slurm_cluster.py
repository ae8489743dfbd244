"""A Slurm cluster for tests: slurmctld, and a slurmd for each node name, on this machine.

The daemons have their own configuration, ports, state and logs in a folder of the test, and end with it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.processes.commands import ROOT, command_line, until
from tests.processes.ssh_hosts import free_port

MEMORY_M = 2000
"""Memory of each node, in MiB, as its configuration has it."""

START_S = 30.0
"""Deadline of the daemons, and of the begin of a job, in seconds."""


def missing() -> str:
    """Return the reason that these tests cannot run; empty if they can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    if not all(shutil.which(name, path=path) for name in ("slurmctld", "slurmd", "sbatch", "srun")):
        return "there is no Slurm: apt-get install slurmctld slurmd slurm-client"
    return "" if os.getuid() == 0 and sys.platform == "linux" else "the daemons of Slurm need root on Linux"


class SlurmCluster:
    """Daemons of Slurm, as a context manager; jobs run as the user of the test.

    Args:
        folder: Folder of their files, and of the jobs.
        names: Names of the nodes.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.names = names
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir()
        settings = {
            "ClusterName": "adam",
            "SlurmctldHost": "localhost(127.0.0.1)",
            "SlurmctldPort": free_port("127.0.0.1"),
            "SlurmUser": "root",
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "%n.pid",
            "EnforcePartLimits": "ALL",
            "MpiDefault": "none",
            "ReturnToService": 2,
            "SlurmdTimeout": 10,
            "KillWait": 10,
        }
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port('127.0.0.1')} "
            f"CPUs=2 RealMemory={MEMORY_M}"
            for name in names
        ]
        lines = [*(f"{name}={value}" for name, value in settings.items()), *nodes]
        lines.append(f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP")
        self.file = folder / "slurm.conf"
        self.file.write_text("".join(f"{line}\n" for line in lines))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ADAM_", "SLURM"))}
        kept["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
        if data := os.environ.get("ADAM_DATA_DIR"):
            kept["ADAM_DATA_DIR"] = data
        self.environment = {**kept, "SLURM_CONF": str(self.file), "PYTHONPATH": str(ROOT)}

    def __enter__(self) -> "SlurmCluster":
        self._start("slurmctld", "slurmctld", "-D")
        for name in self.names:
            self._start(name, "slurmd", "-D", "-N", name)
        self.wait_until_idle()
        return self

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.daemons[name] = subprocess.Popen(
                [*words, "-f", self.file],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def run(self, *words: str) -> str:
        """Run a command of Slurm; returns its output, empty if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    def launch(self, *words: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run ``adam-async launch slurm`` on the login node."""
        return subprocess.run(
            [sys.executable, "-m", "adam_async", "launch", "slurm", *words],
            cwd=folder or self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def processes(self, name: str) -> list[int]:
        """Return the daemon of a node, its tasks, and the step daemons of these, which have left it."""
        marks = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.file}".encode()}
        found = {self.daemons[name].pid}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and marks <= {*(entry / "environ").read_bytes().split(b"\0")}:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    found |= {int(entry.name)}
                    if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                        found |= {parent}
            except OSError:  # the process has ended
                continue
        return sorted(found)

    def kill(self, name: str) -> None:
        """Kill a node with all its processes, as the loss of its machine would.

        All processes stop before the first one dies: a second process of `srun` would notice the death of the
        first, and ask slurmctld to kill the step on all nodes. On a lost machine, no process acts any more.
        """
        stopped: set[int] = set()
        while new := set(self.processes(name)) - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        self.daemons[name].wait()

    def revive(self, name: str) -> None:
        """Replace a killed node by a machine of the same name; it has registered on return."""
        # slurmd removes files of earlier jobs as it registers, also those of a job that starts meanwhile.
        shutil.rmtree(self.folder / name)
        self._start(name, "slurmd", "-D", "-N", name)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until all nodes are idle."""
        states = ["idle"] * len(self.names)
        words = ("sinfo", "-h", "-N", "-o", "%T")
        until(lambda: self.run(*words).split() == states, "idle nodes", seconds=START_S)

    def __exit__(self, *exc: object) -> None:
        self.run("scancel", "--state=RUNNING", "--state=PENDING", "--quiet")
        for name in self.names:
            self.kill(name)
        self.daemons["slurmctld"].kill()
        self.daemons["slurmctld"].wait()


class SlurmJob:
    """A submitted job, and its output."""

    def __init__(self, cluster: SlurmCluster, *words: str) -> None:
        self.cluster = cluster
        done = cluster.launch(*words, "--submit")
        assert done.returncode == 0, done.stdout + done.stderr
        self.number = done.stdout.split()[2].rstrip(";")
        self._file = cluster.folder / f"adam-async-{self.number}.out"

    @property
    def output(self) -> str:
        return self._file.read_text() if self._file.exists() else ""

    @property
    def state(self) -> str:
        """State of the job, such as RUNNING."""
        return self.cluster.run("squeue", "-h", "--states=all", "-o", "%T", "-j", self.number)

    def wait_for(self, text: str, *, seconds: float = 60.0) -> None:
        """Wait for a text in the output."""
        try:
            until(lambda: text in self.output, f"{text!r}", seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.output}") from None

    def wait_for_state(self, *states: str, seconds: float = 60.0) -> None:
        """Wait for one of some states."""
        until(lambda: self.state in states, f"{states} in place of {self.state}", seconds=seconds)

    def start_now(self) -> None:
        """Start a job that has returned into the queue, without the two minutes that Slurm lets it wait.

        A node refuses a job whose credential is no younger than the end of its last start, in whole seconds:
        the next start is in a later second.
        """
        self.wait_for_state("PENDING")
        self.cluster.wait_until_idle()
        ended = time.time()
        until(lambda: time.time() > ended + 2, "a later second")

        def runs() -> bool:
            self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            return self.state == "RUNNING"

        until(runs, "the job to run", seconds=START_S)

    def roles(self) -> dict[str, tuple[str, int]]:
        """Return node and process id of each role, by node id."""
        found = {}
        for name in self.cluster.names:
            if self.cluster.daemons[name].poll() is None:
                for pid in self.cluster.processes(name):
                    _, _, rest = command_line(pid).partition(" --id ")
                    if "--supervised" in rest:
                        found[rest.split()[0]] = (name, pid)
        return found


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
