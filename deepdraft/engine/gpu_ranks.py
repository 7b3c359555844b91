"""A rank of several on GPUs: its process group, its exchange, its part of the weights.

Owns: what `engine.ranks` needs of a GPU. Knows nothing of: commands between ranks, requests.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from deepdraft.checkpoint.device_source import DeviceSource
from deepdraft.checkpoint.presharded import is_presharded, shard_plan
from deepdraft.checkpoint.progress import Bar
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.gpu_runner import GpuRunner, prefill_plan
from deepdraft.engine.ranks import Leading
from deepdraft.engine.runner import Runner, checked_token_map
from deepdraft.errors import ConfigError
from deepdraft.kernels.one_shot import OneShot
from deepdraft.kernels.runtime import ROW_TILE
from deepdraft.models.deepseek_v41 import PrefillMode
from deepdraft.models.v41_device import MOST_ROWS, DeviceV41, enough_memory
from deepdraft.models.v41_joins import RankJoins
from deepdraft.models.v41_prefill_plan import exchange_bytes
from deepdraft.models.v41_prefill_share import Regions, RowShare, own_tables
from deepdraft.parallel.group import ProcessGroup, symmetric_mailbox
from deepdraft.parallel.peers import SymmetricMemory
from deepdraft.parallel.rank import Rank
from deepdraft.parallel.shards import Shards
from deepdraft.parallel.whole import GatheredSource
from deepdraft.text.tokenizer import Tokenizer

_WORK_BYTES = 2 << 30
"""Left for captured steps and what a step makes."""


class GpuRankRunner(GpuRunner):
    """One of several ranks. It does not run ahead of the host: the ranks take call by call."""

    exchange: OneShot

    def ahead(self) -> None:  # type: ignore[override]
        """Nothing."""

    def check_exchanges(self) -> None:
        """Raises EngineError where an exchange since the last check failed on the device."""
        self.exchange.check()


class GpuLeadRunner(Leading, GpuRankRunner):
    """Rank 0."""


def open_gpu_rank(
    me: Rank,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    *,
    token_map: list[int] | None = None,
    drafter: bool = True,
    prefill: PrefillMode = "full",
    prefill_chunk: int | None = None,
    **more: Any,
) -> Runner:
    """This rank's runner on the GPU of its number; rank 0's leads. `more`: of `Runner`.
    `prefill_chunk`: rows of a chunk of encoder prefill at most, of all ranks.

    Raises ConfigError where the GPUs cannot reach each other's memory, or have too little.
    """
    args = checkpoint.args
    torch.cuda.set_device(me.rank)
    device = torch.device("cuda", me.rank)
    group = ProcessGroup(me.rank, me.size, me.store, backend="nccl", pulse=me.pulse)
    group.gather(torch.zeros(1, device=device))
    shards = Shards(shard_plan(args, me.size), group)
    try:
        # The most values of one exchange: an Engram layer's rows of a prompt.
        capacity = MOST_ROWS * (args.hc_mult + 1) * args.hidden_size
        # Logits of one tile of rows, two in a word; more rows are gathered in turns.
        data = ROW_TILE * -(-args.vocab_size // (2 * me.size))
        own, boxes = symmetric_mailbox(me.size, capacity + data)
    except RuntimeError as error:
        raise ConfigError(
            f"--tp {me.size}: the GPUs of this machine cannot reach each other's memory "
            f"({str(error).partition(chr(10))[0][:200]}); see `nvidia-smi topo -p2p r`"
        ) from error
    exchange = OneShot(me.rank, boxes, own, data=data)
    if token_map is None and args.engram_layer_ids:
        if tokenizer is None:
            raise ConfigError("a model with Engram layers needs its tokenizer.json")
        token_map = checked_token_map(checkpoint, tokenizer)
    assert shards.plan is not None
    tables = own_tables(args, shards.plan, me.rank)
    shares = prefill == "encoder"
    with contextlib.ExitStack() as stack:
        source: Any = shards.source(checkpoint)
        whole: Any = checkpoint
        if is_presharded(checkpoint.path):
            bar = None if me.rank else Bar("rank 0's weights")
            source = stack.enter_context(DeviceSource(checkpoint, device, progress=bar))
            whole = GatheredSource(source, shards.plan, group, device)
        joins = RankJoins(exchange, tables)
        model = DeviceV41(
            args, source, token_map, device=device, drafter=drafter, joins=joins,
            whole=whole if shares else None,
        )  # fmt: skip
    room = _room(group)
    if shares:
        plan = prefill_plan(args, more.get("max_context"), room, prefill_chunk, ranks=me.size)
        room -= plan.workspace
        with enough_memory("the memory of prompts was taken"):
            memory = SymmetricMemory(exchange_bytes(args, plan.rows, me.size))
        model.share_prefill(RowShare(group, Regions(args, plan.rows, memory), tables), plan.rows)
    wanted = more.get("state_bytes")
    more["state_bytes"] = room if wanted is None else min(wanted, room)
    kind = GpuRankRunner if me.rank else GpuLeadRunner
    runner = kind(model, prefill=prefill, **more)
    runner.warm_prefill()
    runner.exchange = exchange
    if isinstance(runner, GpuLeadRunner):
        runner.lead(me, runner.check_exchanges)
    return runner


def _room(group: ProcessGroup) -> int:
    """Bytes for chunks and the state of sequences: what the fullest GPU has left, so that all ranks
    open and refuse alike."""
    free = torch.cuda.mem_get_info()[0] - _WORK_BYTES
    rooms = group.gather(torch.tensor([free], device=torch.cuda.current_device()))
    return min(int(r) for r in rooms)
