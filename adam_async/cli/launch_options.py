"""The options of the launch commands, beside those of `train`."""

from datetime import timedelta
from typing import Annotated

from cyclopts import Parameter

from adam_async.cli.options import options
from adam_async.launch.ray_resources import RaySettings, read_asks, read_variables
from adam_async.launch.slurm import Job


@options
class RayOptions:
    """Options of `launch ray`."""

    address: str = "auto"
    """HOST:PORT of the Ray cluster; auto, the cluster of RAY_ADDRESS or of this machine; or local, a cluster
    that the command starts on this machine."""
    ask: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Resources that each role of a kind asks of Ray, ROLE:RESOURCE=AMOUNT such as worker:CPU=4; roles are
    ps, data, worker and controller. By default servers and data servers ask for at most one CPU, and
    workers share the rest."""
    pack: Annotated[bool, Parameter(negative="")] = False
    """Place the workers on few nodes; by default they are spread over all."""
    room_wait: Annotated[timedelta, Parameter(show_default=lambda _: "60s")] = timedelta(seconds=60)
    """Maximum wait for room on Ray, such as 60s or 5m; an autoscaler needs time to start nodes."""
    env: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Variables of the roles, NAME=VALUE, such as ADAM_DATA_DIR=/data."""

    def settings(self) -> RaySettings:
        """Return the settings of the launcher.

        Raises:
            ConfigError: An option has a wrong value.
        """
        return RaySettings(
            address=self.address,
            asks=read_asks(self.ask),
            pack=self.pack,
            wait_s=self.room_wait.total_seconds(),
            environment=read_variables(self.env),
        )


@options
class SlurmOptions:
    """Options of a Slurm job."""

    submit: Annotated[bool, Parameter(negative="")] = False
    """Submit the job; by default the command prints its script."""
    here: Annotated[bool, Parameter(negative="")] = False
    """Train in this rank of a job: for `srun` in the script, or in a shell of salloc."""
    nodes: int = 1
    """Number of nodes."""
    cpus: int = 0
    """CPUs of each node; by default whole nodes."""
    time: str = ""
    """Time limit, such as 8:00:00; the job ends in order 120 s before, and returns into the queue if it has a
    new checkpoint."""
    partition: str = ""
    """Partition of the nodes."""
    job_name: str = "adam-async"
    """Name of the job, and beginning of the name of its output."""

    def job(self, memory_bytes: int = 0) -> Job:
        """Return the job, with this memory of each node. Raises ConfigError: an option has a wrong value."""
        return Job(
            nodes=self.nodes,
            cpus=self.cpus,
            memory_bytes=memory_bytes,
            time=self.time,
            partition=self.partition,
            name=self.job_name,
        )
