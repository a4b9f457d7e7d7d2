"""Two nodes, as threads, that take what the other published, and end without closing anything, as a script does.

Prints the threads that are left when all handlers of the exit have run.
"""

from __future__ import annotations

import atexit
import threading


@atexit.register  # before all others, so that it runs last
def _say() -> None:
    print("left:", *(thread.name for thread in threading.enumerate() if thread.name.startswith("hf-diloco-published")))


def main() -> None:
    from hf_diloco.methods.topology import make_topology
    from tests.gossip_meshes import join
    from tests.islands import run_islands
    from tests.tcp_stores import KeptStore

    store, topology = KeptStore(), make_topology("ring", 2)

    def enter(node: int) -> None:
        join(store, topology, node).published()

    run_islands(2, enter)
    names = [thread.name for thread in threading.enumerate()]
    assert {"hf-diloco-published-0", "hf-diloco-published-1"} <= set(names), names


if __name__ == "__main__":
    main()
