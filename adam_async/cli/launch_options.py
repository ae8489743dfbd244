"""The options of `launch slurm`."""

from typing import Annotated

from cyclopts import Parameter

from adam_async.cli.options import options


@options
class SlurmOptions:
    """Options of a Slurm job."""

    submit: Annotated[bool, Parameter(negative="")] = False
    """Submit the job; by default its script is printed."""
    here: Annotated[bool, Parameter(negative="")] = False
    """Train on the nodes of this job: for the script, or in a shell of salloc."""
    nodes: int = 1
    """Number of nodes."""
    cpus: int = 0
    """CPUs of each node; by default whole nodes."""
    time: str = ""
    """Time limit, such as 8:00:00; the job ends in order 60 s before, and goes back into the queue."""
    partition: str = ""
    """Partition of the nodes."""
    job_name: str = "adam-async"
    """Name of the job, and beginning of the name of its output."""
