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
