"""Engines that start roles on other machines: SSH, torchrun, Slurm, Ray and Kubernetes.

A launcher receives a `RoleSpec` from the room `cluster`, starts the role on another machine, and reports its
address, its lines and its end. The supervisor of the cluster, not the launcher, decides about restarts. On
Kubernetes, and in ranks that run `role --from-env`, the engine starts the roles itself: this room writes the
manifests of Kubernetes, and reads the roles of a process from its environment.

    ssh.py                       `SshLauncher`: each role a command in an SSH session of its own
    hosts.py                     file of hosts; placement of roles on hosts, also after a lost host
    node_memory.py               memory that the roles ask of each host or node
    state_records.py             folders of controllers on hosts; removal of those of a killed launch

    agents.py                    `AgentLauncher`: driver's side of a batch job with an agent on each node
    agent.py                     the agent of a node: starts roles as its children, on orders of the driver
    agent_messages.py            messages between driver and agents
    batch.py                     variables of torchrun; the sbatch script of a Slurm job
    slurm.py                     sbatch, srun and scontrol: submit, run agents, requeue after a lost driver

    ray.py, ray_actor.py         `RayLauncher`: each role a child process of a Ray actor; the actor
    ray_resources.py             resources of the actors (CPUs, memory), and the settings of a launch
    ray_connection.py            connection to a Ray cluster, and a thread for its blocking calls
    ray_probe.py                 an attempt to join a Ray cluster, in a child with a deadline
    ray_cluster.py               `RayCluster`: a cluster on Ray in a program, with results as in Ray Train

    environment.py               roles of a process by rank (torchrun, Open MPI, PMI, Slurm) or pod name
    kubernetes.py, manifests.py  checked description of a run on Kubernetes, and its manifests
"""
