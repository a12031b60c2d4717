"""Starts a Ray cluster of several nodes on this machine, and ends it when standard input closes.

It writes one JSON line: the address of the cluster, and the processes of the raylets. The number of one on
standard input has it killed. The head has no cores, so that every process is placed on another node. The
health check is faster than Ray's own, which notices a lost node after a quarter of a minute.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster

_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


def main(nodes: list[dict[str, int]]) -> None:
    small = {"object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": _HEALTH, **small}
    )
    try:
        started = [
            cluster.add_node(wait=False, num_cpus=n["cpus"], num_gpus=n["gpus"], **small) for n in nodes
        ]
        cluster.wait_for_nodes(timeout=60)
        raylets = {raylet.pid: raylet for raylet in (n.all_processes["raylet"][0].process for n in started)}
        print(json.dumps({"address": cluster.address, "raylets": [*raylets]}), flush=True)
        for line in sys.stdin:
            raylets[int(line)].kill()
            raylets[int(line)].wait()  # its workers take one that is not waited for as alive
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
