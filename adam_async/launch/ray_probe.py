"""``python -m adam_async.launch.ray_probe ADDRESS``: tries to join a Ray cluster, and prints one line.

`ray.init` waits without a limit for an address that does not answer, in a thread that no deadline ends. The
launching process therefore tries the address in a child first, and kills the child at the deadline.

The line is ``joined ADDRESS`` or ``refused WHY``.
"""

import sys


def main(address: str) -> None:
    """Join the cluster and leave it."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        line = f"joined {ray.get_runtime_context().gcs_address}"
        ray.shutdown()
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        line = f"refused {' '.join(str(error).split())}"
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1])
