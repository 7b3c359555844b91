"""A runner on one GPU: the kernels' model behind the calls of `engine.runner`.

Owns: what a GPU must have before a model is loaded on it, how its memory is divided, random weights
instead of a checkpoint's.
Knows nothing of: requests, the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.families import load_model_args
from deepdraft.checkpoint.names import tensor_table
from deepdraft.engine.ahead import Ahead
from deepdraft.engine.dummy import DummyWeights, dummy_args
from deepdraft.engine.pace import LEAST_ROWS, STEP_ROWS
from deepdraft.engine.runner import Runner, checked_token_map
from deepdraft.errors import ConfigError, StateError
from deepdraft.models.deepseek_v41 import PrefillMode
from deepdraft.models.layers import WeightSource
from deepdraft.models.state import SequenceState
from deepdraft.models.v41_device import DevicePool, DeviceV41
from deepdraft.models.v41_prefill_layers import Plans
from deepdraft.models.v41_prefill_plan import CHUNKS, PrefillPlan, plan_prefill
from deepdraft.text.tokenizer import Tokenizer

LEAST_CAPABILITY = (9, 0)
"""Hopper: what the kernels are written and tested for."""
_WORK_BYTES = 2 << 30
"""Set aside for captured steps and what a step makes."""
_DUMMY_TABLE_ROWS = 1 << 20
_CHUNK_ROWS = 8192
"""Rows of a chunk of encoder prefill: longer ones gain little, and hold up who waits."""
_LEAST_ROWS = 256
"""Fewer rows take no less time: a chunk reads the weights of all experts that it meets."""


class Sizes:
    """A directory of which only config.json and the tokenizer count: what `dummy` needs."""

    def __init__(self, path: Path, *, accept_unknown: Iterable[str] = ()) -> None:
        self.path, self.tokenizer_file = path, path / "tokenizer.json"
        self.args = load_model_args(path / "config.json", accept_unknown=accept_unknown)


class GpuRunner(Runner):
    """Runs prompts and steps on one GPU (quant numerics)."""

    model: DeviceV41  # type: ignore[assignment]
    pool: DevicePool  # type: ignore[assignment]

    @property
    def prefill_rows(self) -> int:
        """Rows of a prompt that are read at once."""
        return self.model.prefill_chunk or STEP_ROWS

    @property
    def least_rows(self) -> int:
        """Rows of a prompt that are worth reading at once."""
        return _LEAST_ROWS if self.model.prefill_chunk else LEAST_ROWS

    def prefill(
        self, sequence: SequenceState, token_ids: Sequence[int], *, final: bool
    ) -> Tensor | None:
        """As `Runner.prefill`; waits for the device, so that a chunk's time is known and a fault
        of it is that prompt's."""
        logits = super().prefill(sequence, token_ids, final=final)
        if self.model.prefill_chunk:
            self.model.synchronize()
        return logits

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
        prefill: PrefillMode = "full",
        prefill_chunk: int | None = None,
        prefill_plans: Plans | None = None,
        device: torch.device | str = "cuda",
    ) -> Self:
        """Load the model of a `Checkpoint` or another source of weights with `args`; or (`dummy`)
        random weights of its sizes (`Sizes`) with at most `expert_pool` routed experts.
        `prefill_chunk`: rows of a chunk of encoder prefill at most. Errors say what the GPU lacks,
        or name the tensor."""
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
        model = DeviceV41(
            args, source, token_map, device=device, drafter=drafter, prefill_plans=prefill_plans
        )
        on_gpu = torch.device(device).type == "cuda"
        room = torch.cuda.mem_get_info()[0] - _WORK_BYTES if on_gpu else 1 << 62
        if prefill == "encoder":
            plan = prefill_plan(args, max_context, room, prefill_chunk)
            model.prefill_chunk = plan.rows
            room -= plan.workspace
        if on_gpu:
            state_bytes = room if state_bytes is None else min(state_bytes, room)
        runner = cls(
            model,
            prefill=prefill,
            max_context=max_context,
            num_sequences=num_sequences,
            num_drafts=num_drafts,
            state_bytes=state_bytes,
        )
        if on_gpu:
            runner.warm_prefill()
        return runner

    def warm_prefill(self) -> None:
        """Compile, capture and take the memory of what prompts run, where they are chunks."""
        self.model.warm_prefill()
        window = self.model.args.sliding_window
        if self.model.prefill_chunk and window < self.max_tokens:
            # Of several ranks each does so by itself, before one of them leads.
            sequence = Runner.open_sequence(self)
            Runner.prefill(self, sequence, [0] * window, final=True)
            Runner.close_sequence(self, sequence, scrub=True)
            self.model.synchronize()


def prefill_plan(
    args: V41Args, max_context: int | None, room: int, chunk: int | None, *, ranks: int = 1
) -> PrefillPlan:
    """Rows of a chunk, at most `chunk`, of all `ranks` that share it, beside at least one sequence
    of the longest text in `room` bytes. Raises ConfigError where none fits, which says what
    would."""
    # Ranks that share a chunk are through with it as much sooner.
    most = min(_CHUNK_ROWS * ranks, max(CHUNKS)) if chunk is None else max(8, chunk // 8 * 8)
    chunks = tuple(dict.fromkeys((most, *(rows for rows in CHUNKS if rows < most))))
    try:
        tokens = max_context or args.max_position_embeddings
        return plan_prefill(args, tokens, room, chunks=chunks, ranks=ranks)
    except StateError as error:
        raise ConfigError(
            f"encoder prefill does not fit: {error.message}; lower max_context"
        ) from error


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
