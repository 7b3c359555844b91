"""A runner on one GPU: the kernels' model behind the calls of `engine.runner`.

Owns: what a GPU must have before a model is loaded on it, random weights instead of a checkpoint's.
Knows nothing of: requests, the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch

from deepdraft.arch import V41Args
from deepdraft.checkpoint.families import load_model_args
from deepdraft.checkpoint.names import tensor_table
from deepdraft.engine.ahead import Ahead
from deepdraft.engine.dummy import DummyWeights, dummy_args
from deepdraft.engine.runner import Runner, checked_token_map
from deepdraft.errors import ConfigError
from deepdraft.models.layers import WeightSource
from deepdraft.models.v41_device import DevicePool, DeviceV41
from deepdraft.text.tokenizer import Tokenizer

LEAST_CAPABILITY = (9, 0)
"""Hopper: what the kernels are written and tested for."""
_WORK_BYTES = 2 << 30
"""Set aside for captured steps and what a step makes."""
_DUMMY_TABLE_ROWS = 1 << 20


class Sizes:
    """A directory of which only config.json and the tokenizer count: what `dummy` needs."""

    def __init__(self, path: Path, *, accept_unknown: Iterable[str] = ()) -> None:
        self.path, self.tokenizer_file = path, path / "tokenizer.json"
        self.args = load_model_args(path / "config.json", accept_unknown=accept_unknown)


class GpuRunner(Runner):
    """Runs prompts and steps on one GPU (quant numerics, full prefill)."""

    model: DeviceV41  # type: ignore[assignment]
    pool: DevicePool  # type: ignore[assignment]

    def ahead(self) -> Ahead:
        """Decoding on the device, for the requests that allow it."""
        return Ahead(self)

    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint: Any,
        tokenizer: Tokenizer | None,
        *,
        max_context: int | None = None,
        num_sequences: int = 1,
        drafter: bool = False,
        num_drafts: int | None = None,
        dummy: bool = False,
        expert_pool: int | None = None,
        state_bytes: int | None = None,
        device: torch.device | str = "cuda",
    ) -> Self:
        """Load the model of a `Checkpoint` or another source of weights with `args`; or (`dummy`)
        random weights of its sizes (`Sizes`) with at most `expert_pool` routed experts. Errors say
        what the GPU lacks, or name the tensor."""
        args = checkpoint.args
        if not isinstance(args, V41Args):
            raise ConfigError(
                "the kernels run DeepSeek-V4.1 models only; run this one with --device cpu"
            )
        source: WeightSource = checkpoint
        if dummy:
            args = dummy_args(args, expert_pool=expert_pool, engram_rows=_DUMMY_TABLE_ROWS)
            source = DummyWeights(args, device=device)
        if torch.device(device).type == "cuda":
            check_gpu(args, drafter=drafter)
        token_map = None
        if args.engram_layer_ids:
            if tokenizer is None:
                raise ConfigError("a model with Engram layers needs its tokenizer.json")
            token_map = checked_token_map(checkpoint, tokenizer)
        model = DeviceV41(args, source, token_map, device=device, drafter=drafter)
        if torch.device(device).type == "cuda":
            room = torch.cuda.mem_get_info()[0] - _WORK_BYTES
            state_bytes = room if state_bytes is None else min(state_bytes, room)
        return cls(
            model,
            max_context=max_context,
            num_sequences=num_sequences,
            num_drafts=num_drafts,
            state_bytes=state_bytes,
        )


def weight_bytes(args: V41Args, *, drafter: bool) -> int:
    """Bytes of the weights that lie on the GPU; Engram tables stay in host memory."""
    modules = ("text", "drafter") if drafter else ("text",)
    return sum(
        entry.num_bytes
        for name, entry in tensor_table(args).items()
        if entry.module in modules and ".engram.embed." not in name
    )


def check_gpu(args: V41Args, *, drafter: bool) -> None:
    """Raises ConfigError where this machine's GPU cannot run the model."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no CUDA device here. Check `nvidia-smi`, and that this "
            f"torch ({torch.__version__}) is built for CUDA and fits the driver; --device cpu runs "
            "without a GPU"
        )
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"--device cuda: {torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need at least "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (Hopper)"
        )
    needed = weight_bytes(args, drafter=drafter) + _WORK_BYTES
    free, total = torch.cuda.mem_get_info()
    if needed > free:
        fitting = max(1, -(-needed // total))
        raise ConfigError(
            f"--device cuda: the weights and work space need {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free on this GPU. It would fit on "
            f"{fitting} such GPUs (--tp); `deepdraft inspect` shows the parts"
        )
