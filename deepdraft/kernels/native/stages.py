"""Which stages between the products run in CUDA C++.

Owns: the names of the stages, the switch a measurement may set. Knows nothing of: what they
compute.
"""

from collections.abc import Iterable

import torch

from deepdraft.kernels.native import stream

STAGES = ("attend", "attend_rows", "boundary", "route", "scores", "select", "stream_top")
_chosen = set(STAGES)


def use(stages: Iterable[str]) -> None:
    """These stages and no others from now on, where the device runs them at all (measurements)."""
    _chosen.clear()
    _chosen.update(stages)


def enabled(stage: str, device: torch.device) -> bool:
    """Whether a stage is to be launched in CUDA C++ on this device: else Triton's kernels do it."""
    return stage in _chosen and stream.chosen("stage", device)
