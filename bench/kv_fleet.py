"""Runs a fleet while it breaks, and records how that went:

    python bench/kv_fleet.py --servers 2 --turns 1000 [--namespaces] [--numerics exact]
        [--prefill full] [--reuse exact] [--hours H] [--nixl PYTHON]
        [--out bench/results/d-fleet-2.json]

With --hours turns go on for so long; after --most-minutes no further turn begins. Needs
redis-server; --namespaces needs root.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.proof.bench import provenance
from tests.kv.fleet_run import FleetRun, can_make_networks

FAULTS = ["kill", "leave", "stall", "redis_lost", "leave_killed", "redis_stall", "redis_old"]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--numerics", default="exact")
    parser.add_argument("--prefill", default="full")
    parser.add_argument("--reuse", choices=("exact", "whole", "replay"), default="exact")
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--most-minutes", type=float)
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--nixl", help="chunks through sidecars that this interpreter runs")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    namespaces = options.namespaces and can_make_networks()
    if options.namespaces and not namespaces:
        print("no network namespaces here (root and the ip command are needed): loopback")
    faults = [*FAULTS, "partition"] if namespaces else FAULTS
    what = vars(options) | {"out": None, "nixl": bool(options.nixl)}
    result: dict[str, Any] = {"what": what, **provenance()}
    with tempfile.TemporaryDirectory() as directory:
        run = FleetRun(
            Path(directory),
            servers=options.servers,
            numerics=options.numerics,
            prefill=options.prefill,
            reuse=options.reuse,
            namespaces=namespaces,
            nixl=options.nixl,
            first_port=18000 + 400 * options.servers + (200 if options.numerics != "exact" else 0),
        )
        try:
            result |= run.run(
                turns=options.turns,
                conversations=options.conversations,
                every=options.every,
                faults=faults,
                seconds=3600 * options.hours or None,
                most_s=60 * options.most_minutes if options.most_minutes else float("inf"),
            )
        finally:
            run.close()
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    wrong = ("different", "client_errors", "oracle_lacks_the_start")
    failed = any(result.get(name) for name in wrong) or result["servers"]["leaked_bytes"]
    if not result.get("from_peer"):
        sys.exit("nothing came from a peer: the servers do not reach each other or the directory")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
