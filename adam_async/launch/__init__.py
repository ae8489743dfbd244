"""Engines that start roles on other machines: SSH, torchrun, Slurm, Ray and Kubernetes.

A launcher receives a `RoleSpec` from the room `cluster`, starts the role on another machine, and reports its
address, its lines and its end. The cluster's supervisor, not the launcher, decides about restarts. torchrun,
Slurm and Kubernetes start the roles themselves: this room reads a process's roles from its environment, and
writes a Slurm job's script. The manifests of Kubernetes are a chart (`deploy/chart`).

    settings.py                  the interface: a description with the options of `launch NAME`, and `train`

    ssh.py                       `SshLauncher`: each role a command in an SSH session of its own
    hosts.py                     file of hosts; placement of roles on hosts, also after a lost host

    torchrun.py                  the variables of a rank of torchrun
    slurm.py                     script and memory of a Slurm job, and `sbatch`

    ray.py, ray_actor.py         `RayLauncher`: each role a child process of a Ray actor; the actor;
                                 connection to a Ray cluster, and a thread for its blocking calls
    ray_resources.py             resources of the actors (CPUs, memory), and the description of the launcher
    ray_probe.py                 an attempt to join a Ray cluster, in a child with a deadline

    environment.py               roles of a process by rank (torchrun, Open MPI, PMI, Slurm) or pod name
"""
