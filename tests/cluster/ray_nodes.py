"""`ray_nodes.py NODES SECONDS` starts a Ray cluster of several nodes on this machine.

It ends the cluster when standard input closes.

It writes one JSON line with the address of the cluster and the process ids of the raylets. When it reads one
of these ids from standard input, it kills that raylet. The head node has no CPUs, so every process is placed
on another node. The health check finds a killed raylet, which refuses connections, within seconds; Ray's
default takes 15 seconds. A raylet that only answers slowly, because the machine is busy, is not lost.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster

_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 5,
}


def main(nodes: list[dict[str, int]], start_s: float) -> None:
    small = {"object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": _HEALTH, **small}
    )
    try:
        started = [
            cluster.add_node(wait=False, num_cpus=n["cpus"], num_gpus=n["gpus"], **small) for n in nodes
        ]
        cluster.wait_for_nodes(timeout=start_s)
        raylets = {raylet.pid: raylet for raylet in (n.all_processes["raylet"][0].process for n in started)}
        print(json.dumps({"address": cluster.address, "raylets": [*raylets]}), flush=True)
        for line in sys.stdin:
            raylets[int(line)].kill()
            raylets[int(line)].wait()  # its workers consider a raylet alive until it is reaped
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), float(sys.argv[2]))
