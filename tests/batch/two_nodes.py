"""A Ray cluster of two nodes on this machine, a batch on it, and one node lost when its first answers are there. Usage: two_nodes.py FOLDER COMMAND..."""
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster


def main() -> int:
    out = Path(sys.argv[1]) / "out.jsonl"
    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    other = cluster.add_node(**small)
    cluster.wait_for_nodes()
    try:
        process = subprocess.Popen([*sys.argv[2:], "--ray", cluster.address])
        while process.poll() is None and not (out.exists() and out.stat().st_size > 2000):
            time.sleep(0.1)
        before = out.read_text().count("\n") if out.exists() else 0
        cluster.remove_node(other, allow_graceful=False)
        code = process.wait()
        print(f"lost a node after {before} rows; exit code {code}", flush=True)
        return code
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
