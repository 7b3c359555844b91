"""What a prompt needs: device memory of a chunk, and arithmetic and bytes by part of the model.

Owns: the memory plan (how many rows run at once, refused with the number that would fit), the work
of a prompt by stage from sizes alone. The limit that a measurement is compared with is `limit_s`.
Knows nothing of: torch, weights, measurements.

Letters: R rows of a chunk, N tokens, S residual streams, D hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepdraft.arch import V41Args
from deepdraft.errors import StateError

CHUNKS = (32768, 16384, 8192, 4096, 2048, 1024, 512, 256)
"""Rows of a chunk, from the most on."""
PLAIN_ROWS = 1024
"""Rows of a chunk from which weights, entries and keys are unpacked to bf16 first."""
EXPERTS_AT_ONCE = 32
"""Of them, at most."""
REGION_ALIGN = 256
"""Bytes at which a region of exchanged rows begins."""
_ROW_TILE = 16
_RESERVE = 1.1
"""Room for what the allocator rounds up."""
_FP8 = 1 + 1 / 1024
_FP4 = 0.5 + 1 / 32
_WINDOW, _MAIN, _INDEX = 1 + 1 / 32, 0.5 + 1 / 16, 0.5 + 1 / 32


# ---- memory --------------------------------------------------------------------------------


def held_candidates(args: V41Args) -> int:
    """Candidates of a row in the index kernel (`prefill_index.held_places` of its plan)."""
    return 1 << (4 * args.index_topk - 1).bit_length()


def plain_values(args: V41Args, experts: int) -> int:
    """Values of the largest matrix, or of so many experts' gate and up maps, that is unpacked at
    once."""
    d, c = args.hidden_size, args.head_dim
    queries = args.num_attention_heads * c + args.index_n_heads * args.index_head_dim
    output = args.o_groups * args.o_lora_rank
    sizes = [
        min(experts, args.n_routed_experts) * 2 * args.moe_intermediate_size * d,
        queries * args.q_lora_rank, output * max(d, args.num_attention_heads * c // args.o_groups),
        (args.q_lora_rank + c) * d, 3 * args.moe_intermediate_size * d,
        args.n_routed_experts * d, (2 * c + args.index_n_heads + 32) * d,
    ]  # fmt: skip
    if args.engram_layer_ids:
        groups = (args.engram_max_ngram_size - 1) * args.engram_n_heads
        sizes.append(groups * args.engram_head_dim * (args.hc_mult + 1) * d)
    return max(sizes)


def padded_chunk(rows: int) -> int:
    """Rows of a chunk's buffers."""
    return -(-rows // _ROW_TILE) * _ROW_TILE


def rows_each(first: int, total: int, ranks: int) -> int:
    """Rows at most that each of `ranks` has of a chunk of `total` rows from position `first` on, a
    multiple of 8 (so that equal shapes are exchanged)."""
    return -(-(total + first % 2) // (8 * ranks)) * 8


def exchange_regions(
    args: V41Args, rows: int, ranks: int
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """What every rank holds for the others to write, for chunks of `rows` rows at most, one behind
    the other: by exchange, bytes of a value and shape."""
    each, whole = padded_chunk(rows_each(1, rows, ranks)), padded_chunk(rows)
    hidden, k = args.hidden_size, args.num_experts_per_tok
    c, ci = args.head_dim, args.index_head_dim
    regions: dict[str, tuple[int, tuple[int, ...]]] = {
        "inputs": (2, (whole, hidden)),
        "picks": (4, (whole, k)),
        "weights": (4, (whole, k)),
        "sums": (2, (each, ranks, hidden)),
        "window": (1, (args.sliding_window - 1 + whole + each, int(c * _WINDOW))),
        "main": (1, (whole, int(c * _MAIN))),
        "index": (1, (whole, int(ci * _INDEX))),
    }
    if args.engram_layer_ids:
        tables = (args.engram_max_ngram_size - 1) * args.engram_n_heads
        regions["tables"] = (2, (each, tables * args.engram_head_dim))
    return regions


def exchange_bytes(args: V41Args, rows: int, ranks: int) -> int:
    """Bytes of all that; none alone."""
    if ranks == 1:
        return 0
    sizes = (n * math.prod(shape) for n, shape in exchange_regions(args, rows, ranks).values())
    return sum(-(-size // REGION_ALIGN) * REGION_ALIGN for size in sizes)


def workspace_bytes(args: V41Args, rows: int, *, ranks: int = 1) -> int:
    """Device memory that a chunk of so many rows needs beside weights and state: the most that is
    live at once, in attention, in the experts or between them. `ranks` that share its rows: of each
    of them, what they exchange through included."""
    d, c, f = args.hidden_size, args.head_dim, args.moe_intermediate_size
    k, streams = args.num_experts_per_tok, args.hc_mult * args.hidden_size
    heads = args.num_attention_heads * c
    index = args.index_n_heads * args.index_head_dim
    mix = (2 + args.hc_mult) * args.hc_mult
    raw = 4 * (2 * c + args.index_n_heads)
    entered = 2 * streams + 4 * d + 4 * mix  # streams, input, the same quantised, coefficients
    grouped = args.o_groups * args.o_lora_rank
    sources = sum(role.runs_indexer for role in args.roles[: args.decoder_start])
    # Tables, addresses and selections live as long as the chunk; candidates and windows always.
    fixed = 3 * 2 * 4 * (args.qk_rope_head_dim // 2) + 16 * 4 + sources * 2 * 4 * args.index_topk
    fixed += 8 * held_candidates(args) + int(c * (_WINDOW + 2))
    engram = 0
    if args.engram_layer_ids:
        groups = (args.engram_max_ngram_size - 1) * args.engram_n_heads
        table = groups * args.engram_head_dim
        fixed += len(args.engram_layer_ids) * groups * 8 * ranks
        engram = 4 * streams + 4 * table + 2 * (args.hc_mult + 1) * d
    latents = 2 * (args.q_lora_rank + c) + 3 * args.q_lora_rank
    attention = entered + raw + latents + 2 * (heads + index) + 2 * index + 2 * heads
    output = entered + raw + 2 * (heads + index) + 2 * heads + 2 * grouped + 2 * d
    # Experts see the rows of all ranks, by a part of their width.
    routed = 2 * k * (f + ranks * d) + 40 * k * ranks
    experts = entered + 4 * args.n_routed_experts + routed + 7 * f + 2 * d
    sums = 4 * (mix + 1) * -(-streams // 1024)  # of the next coefficients, by part
    between = 2 * streams + entered + (2 * k * d if ranks == 1 else 0) + 2 * d + sums
    row = fixed + max(attention, output, experts, between, engram)
    tail = args.sliding_window * (2 * streams + 4 * args.hc_mult)
    unpacked = 2 * plain_values(args, EXPERTS_AT_ONCE) if rows >= PLAIN_ROWS else 0
    # The replay's scores of 16 rows over the whole context are counted with the state.
    own = rows_each(1, rows, ranks) if ranks > 1 else rows
    held = _RESERVE * (own * row + 2 * tail) + unpacked
    return int(held) + exchange_bytes(args, rows, ranks)


def state_bytes(args: V41Args, tokens: int, *, spare: int = 64) -> int:
    """One sequence of so many tokens in packed records (architecture notes 8.1), and the rotary
    tables and token ids of its positions."""
    c, ci = args.head_dim, args.index_head_dim
    layers = args.num_hidden_layers + args.num_nextn_predict_layers
    total = layers * (args.sliding_window + spare) * c * _WINDOW
    for source in args.kv_source_layer_ids:
        entries = -(-tokens // args.compress_ratios[source])
        total += entries * (c * _MAIN + ci * _INDEX)
    return int(total + tokens * (4 + 16 * (args.qk_rope_head_dim // 2)))


def entry_values_bytes(args: V41Args, tokens: int) -> int:
    """Main entries and index keys of the encoder's sources as bf16, one source at a time."""
    roles = args.roles[: args.decoder_start]
    ratios = [role.ratio for role in roles if role.owns_kv]
    entries = -(-tokens // min(ratios)) if ratios else 0
    return 2 * entries * (args.head_dim + args.index_head_dim)


def replay_bytes(args: V41Args, tokens: int) -> int:
    """Scores of the decoder's replay: 16 rows over all entries, and their blocks."""
    return int(16 * 4 * tokens * (1 + 2 / args.candidate_block_size))


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """`rows` run at once; bytes beside the weights: of chunks, of one sequence's state."""

    rows: int
    workspace: int
    state: int


def plan_prefill(
    args: V41Args,
    tokens: int,
    free: int,
    *,
    chunks: tuple[int, ...] = CHUNKS,
    state: bool = True,
    ranks: int = 1,
) -> PrefillPlan:
    """The largest chunk with which a prompt of `tokens` fits into `free` bytes; `state` False: its
    sequence is allocated already; `ranks` that share a chunk's rows: bytes are those of each.
    StateError, with how many tokens would fit, where none does."""
    held = state_bytes(args, tokens) if state else 0
    # A chunk is no longer than the prompt needs.
    wanted = [rows for rows in sorted(chunks, reverse=True) if rows < 2 * tokens] or [min(chunks)]
    for rows in wanted:
        work = _work_bytes(args, rows, tokens, ranks)
        if held + work <= free:
            return PrefillPlan(rows, work, held)
    least = min(chunks)
    fitting = _most_tokens(args, free, least, state=state, ranks=ranks)
    raise StateError(
        f"a prompt of {tokens} tokens needs {held / 1e9:.2f} GB of state and "
        f"{_work_bytes(args, least, tokens, ranks) / 1e9:.2f} GB to work in, "
        f"{free / 1e9:.2f} GB are free; {fitting} tokens would fit"
    )


def _work_bytes(args: V41Args, rows: int, tokens: int, ranks: int) -> int:
    # CUDA C++ attention takes entries unpacked however few rows there are.
    work = workspace_bytes(args, rows, ranks=ranks) + entry_values_bytes(args, tokens)
    return max(work, replay_bytes(args, tokens) + exchange_bytes(args, rows, ranks))


def _most_tokens(args: V41Args, free: int, rows: int, *, state: bool, ranks: int) -> int:
    low, high = 0, args.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        held = state_bytes(args, middle) if state else 0
        work = _work_bytes(args, rows, middle, ranks)
        low, high = (middle, high) if held + work <= free else (low, middle - 1)
    return low


# ---- work ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """Of one chunk: floating-point operations and bytes of device memory, each counted once."""

    flop: float
    bytes: float


def chunk_work(args: V41Args, rows: int, context: int, *, experts: int | None = None) -> dict[
    str, Stage
]:  # fmt: skip
    """The encoder's work on `rows` rows that begin at position `context`, by stage. `experts`:
    different ones that a layer reads (all)."""
    d, c, f = args.hidden_size, args.head_dim, args.moe_intermediate_size
    heads = args.num_attention_heads * c
    wide, k = args.o_groups * args.o_lora_rank, args.num_experts_per_tok
    roles = args.roles[: args.decoder_start]
    layers = len(roles)
    dense = (args.q_lora_rank + c) * d + args.q_lora_rank * heads + heads * args.o_lora_rank
    dense += wide * d
    index = args.index_n_heads * args.index_head_dim
    stages: dict[str, Stage] = {}

    def matrix(name: str, weights: float, width: float, traffic: float) -> None:
        stages[name] = Stage(2.0 * rows * weights, weights * width + rows * traffic)

    entry = sum(role.ratio * c * d + args.index_head_dim * c for role in roles if role.owns_kv)
    entry += c * d + args.index_head_dim * c  # the decoder's entries
    queries = sum(
        index * args.q_lora_rank + args.index_n_heads * d for r in roles if r.runs_indexer
    )
    moving = 2 * (3 * d + 2 * args.q_lora_rank + c + 2 * heads + 2 * wide)
    matrix("attention products", layers * dense, _FP8, layers * moving)
    matrix("index and entry products", entry + queries, 1.5, 6 * d)
    matrix("shared experts", layers * 3 * d * f, _FP8, layers * (4 * d + 8 * f))
    matrix("router", layers * d * args.n_routed_experts, 2, layers * (2 * d))
    read = args.n_routed_experts if experts is None else experts
    stages["routed experts"] = Stage(
        2.0 * rows * layers * k * 3 * d * f,
        layers * (read * 3 * d * f * _FP4 + rows * k * (4 * d + 4 * f)),
    )
    mix = (2 + args.hc_mult) * args.hc_mult
    streams = args.hc_mult * d
    # One read and one write of the streams a sublayer, picks and inputs beside them.
    stages["residual streams"] = Stage(
        2.0 * 3 * rows * layers * 2 * mix * streams,
        rows * layers * (2 * 4 * streams + 2 * (k + 2) * d + 2 * 6 * d),
    )
    if args.engram_layer_ids:
        groups = (args.engram_max_ngram_size - 1) * args.engram_n_heads * args.engram_head_dim
        count = len(args.engram_layer_ids)
        matrix(
            "engram", count * groups * (args.hc_mult + 1) * d, _FP8,
            count * (groups * 4 + 4 * (args.hc_mult + 1) * d + 4 * streams),
        )  # fmt: skip
    scored = keys = selected = 0.0
    for role in roles:
        if role.runs_indexer:
            reach = (context + rows / 2) / role.ratio
            scored += rows * reach
            keys += (context + rows) / role.ratio * args.index_head_dim * _INDEX
        entries = min(args.index_topk, (context + rows / 2) / role.ratio) if role.ratio else 0
        selected += rows * (min(args.sliding_window, context + rows / 2) + entries)
    stages["index scores"] = Stage(2.0 * scored * index, keys)
    stages["attention"] = Stage(4.0 * selected * heads, layers * rows * 2 * 2 * heads)
    return stages


def prompt_work(
    args: V41Args, tokens: int, *, chunk: int = 8192, experts: int | None = None
) -> dict[str, Stage]:
    """The encoder's work on a whole prompt, by stage."""
    total: dict[str, Stage] = {}
    for at in range(0, tokens, chunk):
        for name, stage in chunk_work(args, min(chunk, tokens - at), at, experts=experts).items():
            old = total.get(name, Stage(0.0, 0.0))
            total[name] = Stage(old.flop + stage.flop, old.bytes + stage.bytes)
    return total


def limit_s(work: dict[str, Stage], *, flops: float, rate: float) -> float:
    """Seconds at `flops` operations and `rate` bytes a second: the larger of all arithmetic and
    all bytes."""
    return max(
        sum(s.flop for s in work.values()) / flops, sum(s.bytes for s in work.values()) / rate
    )
