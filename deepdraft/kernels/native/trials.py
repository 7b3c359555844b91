"""Forms of the CUDA C++ kernels that no GPU has confirmed yet, each behind a name, all off.

Owns: the names, the switch. Knows nothing of: what the kernels compute.

A form that a measurement confirms (same bits where that is promised, faster in the whole step)
becomes the usual one and loses its name; one that does not is deleted.
"""

import contextlib
import os
from collections.abc import Generator, Iterable

from deepdraft.errors import ConfigError

SETTING = "DEEPDRAFT_TRIALS"
NAMES = {
    "shared": "the shared expert in the grid of the routed ones (read at load, too)",
    "even": "blocks with one task more are the first ones",
    "cyclic": "experts up: units are given to the blocks in turn",
    "joined": "attention's chunks are combined by the block that arrives last",
    "early": "the router lets the experts start when it has its rows",
    "ahead": "attention has the output map's weights brought into the L2 cache",
    "query": "the boundary has the query map's weights brought into the L2 cache",
    "bulk": "plans with bulk copies, where they were faster alone (read at load)",
    "lanes": "every lane arrives at the barriers of sums (racecheck; slower)",
}
_chosen: frozenset[str] | None = None


def use(names: Iterable[str]) -> None:
    """These forms and no others from now on (measurements). ConfigError for an unknown name."""
    global _chosen
    chosen = frozenset(names)
    if unknown := chosen - NAMES.keys():
        raise ConfigError(f"unknown trials {sorted(unknown)}: there are {', '.join(NAMES)}")
    _chosen = chosen


@contextlib.contextmanager
def using(*names: str) -> Generator[None]:
    """These forms and no others inside."""
    global _chosen
    before = _chosen
    use(names)
    try:
        yield
    finally:
        _chosen = before


def on(name: str) -> bool:
    """Whether a form is tried."""
    if _chosen is None:
        use(n for n in os.environ.get(SETTING, "").split(",") if n)
        assert _chosen is not None
    return name in _chosen
