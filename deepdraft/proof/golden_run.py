"""Our side of the golden replay: the runs that a golden directory records, as named arrays.

Owns: the four kinds of run (prompt and decode, one-shot, prefix, short prompts), the replayed
prefill, and what each array is made from. Array names and layouts are those of the data's README.
Knows nothing of: recorded values, tolerances, printing.

Shapes: N tokens of a text, W window, S streams, D hidden; row i belongs to position i.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.dspark import Draft
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.proof.golden_files import Texts

STEP_ROWS = 64
"""Tokens of one step; the cut does not change a bit."""

Arrays = dict[str, Tensor]

_LAYER_NAMES = (
    "stream_in",
    "premix_in",
    "attn_pre",
    "attn_post",
    "attn_comb",
    "attn_in",
    "q_latent",
    "attn_o",
    "attn_out",
    "stream_mid",
    "ffn_pre",
    "ffn_post",
    "ffn_comb",
    "ffn_in",
    "ffn_out",
    "stream_out",
)
_DRAFT_NAMES = ("stream_in", "premix_in", "attn_in", "attn_out", "ffn_in", "ffn_out")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Places that the recorded files chose: query positions, and positions drafted after."""

    query_positions: list[int]
    draft_positions: list[int]


@dataclass(slots=True)
class Replay:
    """Arrays of one mode by file; `required` names those that a file must have.

    An array that is not required is compared where the file has it. `operands`: for arrays that are
    differences of two values, the largest value subtracted, in the array's unit.
    """

    arrays: dict[str, Arrays] = field(default_factory=dict)
    required: dict[str, set[str]] = field(default_factory=dict)
    operands: dict[str, float] = field(default_factory=dict)

    def put(self, stem: str, name: str, value: Tensor, *, required: bool = True) -> None:
        """Add one array of a file."""
        self.arrays.setdefault(stem, {})[name] = value
        if required:
            self.required.setdefault(stem, set()).add(name)


class Trace:
    """Rows that several steps of one sequence recorded, put together."""

    def __init__(self, keep: Iterable[str]) -> None:
        self.keep = frozenset(keep)
        self.rows: dict[str, dict[str, list[Tensor]]] = {}

    def add(self, record: dict[str, Arrays], count: int) -> None:
        """Take the first `count` rows (what follows is padding) of one step's record."""
        for layer, arrays in record.items():
            mine = self.rows.setdefault(layer, {})
            for name in self.keep & arrays.keys():
                mine.setdefault(name, []).append(arrays[name][:count].clone())

    def get(self, layer: int | str, name: str, *, width: int = 0, fill: float = 0.0) -> Tensor:
        """All rows of one array. Where steps differ in width, it is cut or filled to `width`."""
        key = f"L{layer}" if isinstance(layer, int) else layer
        parts = self.rows[key][name]
        if width:
            short = [width - min(width, part.shape[1]) for part in parts]
            cut = [part[:, :width] for part in parts]
            parts = [F.pad(p, (0, n), value=fill) for p, n in zip(cut, short, strict=True)]
        return torch.cat(parts)


def replay(model: DeepseekV41, texts: Texts, mode: str, inputs: Inputs) -> Replay:
    """Every array of every file of one mode. The model was made with that mode's numerics."""
    out = Replay()
    greedy = texts.greedy[mode]
    whole = len(texts.prompt) + len(greedy)
    pool = model.new_pool(1, max(whole, len(texts.shorts[0])), slack=STEP_ROWS)
    _prompt_and_decode(model, pool, texts, greedy, inputs, out)
    _one_shot(model, pool, [*texts.prompt, *greedy], texts, inputs, out)
    _prefix(model, pool, texts, out)
    short = [_prefill(model, pool, t)[1].logits for t in texts.shorts]
    out.put("logits", f"short{texts.short_label}_logits", torch.stack([_some(x) for x in short]))
    return out


def replay_production(model: DeepseekV41, texts: Texts) -> Replay:
    """Prefill in `encoder` mode, then decode steps (replay-exact)."""
    out = Replay()
    window = model.args.sliding_window
    steps = texts.replay_greedy
    pool = model.new_pool(1, len(texts.prompt) + len(steps), slack=STEP_ROWS)
    state = pool.open()
    tail = model.prefill(
        state, texts.prompt, mode="encoder", logits="all", feed_drafter=model.drafter is not None
    )
    out.put("replay", "tail_logits", _some(tail.logits)[-window:])
    if model.drafter is not None:
        out.put("replay", "tail_main_hidden", _some(tail.taps)[-window:])
    for name, value in cache_arrays(state, model.drafter is not None).items():
        out.put("replay", f"after{len(texts.prompt)}.{name}", value)
    logits, drafts = [], []
    for token in steps:
        step, draft = _decode_step(model, state, token, {}, None)
        logits.append(step.logits)
        if draft is not None:
            drafts.append(draft.token_ids)
    out.put("replay", "decode_logits", torch.cat(logits))
    if model.drafter is not None:
        best = torch.cat(logits).argmax(-1, keepdim=True)
        out.put("replay", "draft_tokens", torch.cat([best, torch.tensor(drafts)], 1).int())
    pool.close(state)
    return out


# ---- runs ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rows:
    logits: Tensor | None
    taps: Tensor | None


def _some(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _prefill(model: DeepseekV41, pool: StatePool, ids: list[int]) -> tuple[SequenceState, _Rows]:
    """An ordinary prefill of a fresh sequence, which is closed again; its rows stay readable."""
    state = pool.open()
    out = model.prefill(state, ids, logits="all", feed_drafter=model.drafter is not None)
    pool.close(state)
    return state, _Rows(out.logits, out.taps)


def _recorded(
    model: DeepseekV41, state: SequenceState, ids: list[int], trace: Trace
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits [N, V], taps [N, taps * D] and last hidden [N, D] of a text, with a trace."""
    logits, taps, hidden = [], [], []
    for at in range(0, len(ids), STEP_ROWS):
        piece = ids[at : at + STEP_ROWS]
        record: dict[str, Arrays] = {}
        first = state.num_tokens
        out = model.step([(state, piece)], record=record)
        trace.add(record, len(piece))
        logits.append(_some(out.logits))
        hidden.append(_some(out.hidden))
        if out.taps is not None:
            model.feed_drafter(state, out.taps, first)
            taps.append(out.taps)
    return torch.cat(logits), torch.cat(taps) if taps else None, torch.cat(hidden)


def _decode_step(
    model: DeepseekV41,
    state: SequenceState,
    token: int,
    record: dict[str, Arrays],
    draft_record: dict[str, Arrays] | None,
    *,
    draft: bool = True,
) -> tuple[_Rows, Draft | None]:
    """One token, the drafter's ring, and a greedy draft after it."""
    first = state.num_tokens
    out = model.step([(state, [token])], record=record)
    if model.drafter is None:
        return _Rows(out.logits, None), None
    model.feed_drafter(state, _some(out.taps), first)
    proposal = None
    if draft:
        best = int(_some(out.logits)[0].argmax())
        proposal = model.drafter.draft(
            state, best, lambda row, _: int(row.argmax()), record=draft_record
        )
    return _Rows(out.logits, out.taps), proposal


def _prompt_and_decode(
    model: DeepseekV41,
    pool: StatePool,
    texts: Texts,
    greedy: list[int],
    inputs: Inputs,
    out: Replay,
) -> None:
    args, state = model.args, pool.open()
    with_drafter = model.drafter is not None
    prompt = model.prefill(state, texts.prompt, logits="all", feed_drafter=with_drafter)
    out.put("logits", "prompt_logits", _some(prompt.logits))
    for name, value in cache_arrays(state, with_drafter).items():
        out.put("kv", f"after{state.num_tokens}.{name}", value)
    trace = Trace(("topk", "kept", "rows", "gate"))
    drafts = DraftTrace(model)
    logits = []
    for token in greedy:
        record: dict[str, Arrays] = {}
        wanted = state.num_tokens in inputs.draft_positions
        note: dict[str, Arrays] = {}
        step, draft = _decode_step(model, state, token, record, note, draft=wanted)
        trace.add(record, 1)
        logits.append(_some(step.logits))
        if draft is not None:
            drafts.add(state.num_tokens - 1, int(logits[-1][0].argmax()), draft, step.taps, note)
    decode_logits = torch.cat(logits)
    out.put("logits", "decode_logits", decode_logits)
    # Greedy tokens as we would have chosen them: after the prompt, and after every step.
    rows = torch.cat([_some(prompt.logits)[-1:], decode_logits])
    out.put("tokens", "greedy_tokens", rows.argmax(-1))
    whole = state.num_tokens
    for name, value in cache_arrays(state, with_drafter).items():
        out.put("kv", f"after{whole}.{name}", value)
    for layer in args.index_source_layer_ids:
        out.put("indexer", f"decode_topk.{layer}", trace.get(layer, "topk").int())
    if args.candidate_source_layer_id in args.index_source_layer_ids:
        blocks = _num_blocks(args, whole)
        kept = trace.get(args.candidate_source_layer_id, "kept", width=blocks)
        out.put("indexer", "decode_block_keep", kept.to(torch.uint8))
    for layer in args.engram_layer_ids:
        out.put("engram", f"decode_rows.{layer}", trace.get(layer, "rows"))
        out.put("engram", f"decode_gate.{layer}", trace.get(layer, "gate"))
    if with_drafter:
        drafts.put_into(out)
    pool.close(state)


def _one_shot(
    model: DeepseekV41,
    pool: StatePool,
    ids: list[int],
    texts: Texts,
    inputs: Inputs,
    out: Replay,
) -> None:
    args, state = model.args, pool.open()
    trace = Trace(
        (
            *("topk", "scores", "kept", "index_q", "index_w"),
            *("rows", "emb", "kv", "dot", "gate"),
            *("experts", "weights", "scores_router"),
        )
    )
    logits, taps, _ = _recorded(model, state, ids, trace)
    pool.close(state)
    out.put("logits", "oneshot_logits", logits)
    if taps is not None:
        out.put("dspark", "main_hidden_oneshot", taps)
    n, head = len(ids), len(texts.prefix)
    for layer in args.index_source_layer_ids:
        _index_layer(args, trace, layer, n, inputs.query_positions, out)
    out.put("indexer", "positions", torch.tensor(inputs.query_positions, dtype=torch.int32))
    if args.candidate_source_layer_id in args.index_source_layer_ids:
        _block_arrays(args, trace, n, out)
    for layer in args.engram_layer_ids:
        out.put("engram", f"rows.{layer}", trace.get(layer, "rows"))
        out.put("engram", f"emb.{layer}", trace.get(layer, "emb")[:head])
        out.put("engram", f"kv.{layer}", trace.get(layer, "kv"))
        out.put("engram", f"dot.{layer}", trace.get(layer, "dot"))
        out.put("engram", f"gate.{layer}", trace.get(layer, "gate"))
    for layer in range(args.num_hidden_layers):
        scores = trace.get(layer, "scores_router")
        out.put("router", f"experts.{layer}", trace.get(layer, "experts").int())
        out.put("router", f"weights.{layer}", trace.get(layer, "weights"))
        biased = scores + model.blocks[layer].moe.bias
        out.put("router", f"gap.{layer}", cut_gap(biased, args.num_experts_per_tok))
        out.operands[f"gap.{layer}"] = _largest(biased, biased.new_ones(n))
        out.put("router", f"scores{texts.prefix_label}.{layer}", scores[:head])


def _index_layer(
    args: V41Args, trace: Trace, layer: int, n: int, positions: list[int], out: Replay
) -> None:
    entries = n // args.compress_ratios[layer]
    scores = trace.get(layer, "scores", width=entries, fill=-torch.inf)
    out.put("indexer", f"topk.{layer}", trace.get(layer, "topk").int())
    std = spread(scores)
    out.put("indexer", f"score_gap.{layer}", cut_gap(scores, args.index_topk) / std)
    out.operands[f"score_gap.{layer}"] = _largest(scores, std)
    for position in positions:
        out.put("indexer", f"score.{layer}.pos{position}", scores[position])
    for name in ("index_q", "index_w"):
        out.put("indexer", f"{name}.{layer}", trace.get(layer, name)[positions])


def _block_arrays(args: V41Args, trace: Trace, n: int, out: Replay) -> None:
    """The first selection level, from the recorded scores: best of each block, newest forced."""
    source, size = args.candidate_source_layer_id, args.candidate_block_size
    ratio, blocks = args.compress_ratios[source], _num_blocks(args, n)
    scores = trace.get(source, "scores", width=blocks * size, fill=-torch.inf)
    best = scores.view(n, blocks, size).amax(-1)
    for row in range(n):
        reach = (row + 1) // ratio
        if reach:
            best[row, (reach - 1) // size] = torch.inf
    kept = trace.get(source, "kept", width=blocks)
    out.put("indexer", "block_score", best)
    out.put("indexer", "block_keep", kept.to(torch.uint8))
    std = spread(best)
    out.put("indexer", "block_gap", cut_gap(best, args.candidate_topk_blocks) / std)
    out.operands["block_gap"] = _largest(best, std)


def _prefix(model: DeepseekV41, pool: StatePool, texts: Texts, out: Replay) -> None:
    args, state, stem = model.args, pool.open(), f"layers{texts.prefix_label}"
    trace = Trace((*_LAYER_NAMES, "latent", "topk"))
    logits, _, hidden = _recorded(model, state, texts.prefix, trace)
    out.put("logits", f"prompt{texts.prefix_label}_logits", logits)
    out.put(stem, "final_collapsed", hidden)
    for name, value in cache_arrays(state, model.drafter is not None).items():
        out.put("kv", f"after{state.num_tokens}.{name}", value)
    for layer in range(args.num_hidden_layers):
        for name, value in layer_arrays(args, trace, layer).items():
            out.put(stem, f"L{layer}.{name}", value, required=_always_recorded(args, layer, name))
    pool.close(state)


def layer_arrays(args: V41Args, trace: Trace, layer: int) -> Arrays:
    """The layers file's arrays of one layer from a trace of a text from its beginning."""
    role = args.roles[layer]
    arrays = {name: trace.get(layer, name) for name in _LAYER_NAMES}
    for name in ("premix_in", "attn_pre", "attn_post", "ffn_pre", "ffn_post"):
        arrays[name] = arrays[name].squeeze(1)
    if role.owns_kv:
        # At ratio 2 the odd rows complete an entry.
        arrays["latent"] = trace.get(layer, "latent")[role.ratio - 1 :: role.ratio]
    if role.ratio:
        arrays["topk"] = trace.get(layer, "topk").int()
    return arrays


def _always_recorded(args: V41Args, layer: int, name: str) -> bool:
    """Whether a layers file must have the array (README: some are kept of some layers only)."""
    if name == "stream_out":
        return layer + 1 in args.engram_layer_ids or layer == args.num_hidden_layers - 1
    if name == "stream_mid":
        return args.compress_ratios[layer] not in args.compress_ratios[:layer]
    if name == "topk":
        return layer in args.index_source_layer_ids
    return True


# ---- pieces --------------------------------------------------------------------------------


def _num_blocks(args: V41Args, tokens: int) -> int:
    entries = tokens // args.compress_ratios[args.candidate_source_layer_id]
    return -(-entries // args.candidate_block_size)


def cut_gap(values: Tensor, k: int) -> Tensor:
    """k-th best minus the next best of each row [R, N]; inf where nothing finite is dropped."""
    if values.shape[1] <= k:
        return torch.full((values.shape[0],), torch.inf, dtype=values.dtype)
    best = values.sort(-1, descending=True).values
    dropped = best[:, k] > -torch.inf
    return torch.where(dropped, best[:, k - 1] - best[:, k], torch.inf)


def spread(values: Tensor) -> Tensor:
    """Standard deviation (n - 1) of the finite values of each row [R, N]; 1 below two of them."""
    finite = torch.isfinite(values)
    count = finite.sum(-1)
    some = torch.where(finite, values, 0.0)
    mean = some.sum(-1) / count.clamp(min=1)
    off = torch.where(finite, values - mean.unsqueeze(1), 0.0)
    std = (off.square().sum(-1) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(count > 1, std, 1.0)


def _largest(values: Tensor, unit: Tensor) -> float:
    """The largest finite magnitude of [R, N] in the unit of its row [R]."""
    return float(torch.where(torch.isfinite(values), values.abs(), 0.0).amax(-1).div(unit).max())


def cache_arrays(state: SequenceState, with_drafter: bool) -> Arrays:
    """A sequence's caches in the layout of the data: rings of W rows, entries, open groups."""
    pool, n = state.pool, state.num_tokens
    args, window = pool.args, pool.args.sliding_window
    positions = np.arange(max(0, n - window), n)
    rows = torch.from_numpy(state.ring_row(positions))
    slots = torch.from_numpy(positions % window)
    layers = args.num_hidden_layers
    arrays: Arrays = {}
    for place in range(pool.window.shape[0] if with_drafter else layers):
        ring = torch.zeros(window, args.head_dim, dtype=pool.dtype)
        ring[slots] = pool.window[place][rows]
        arrays[f"window.{place}" if place < layers else f"draft_window.{place - layers}"] = ring
    for source, ratio in pool.ratios.items():
        first = int(state.entry_row(source, 0))
        arrays[f"main.{source}"] = pool.main[source][first : first + n // ratio].clone()
        arrays[f"index_k.{source}"] = pool.index[source][first : first + n // ratio].clone()
        if ratio == 2 and n % 2:
            row = state.slot * pool.pending_ring + (n - 1) % pool.pending_ring
            value, gate = pool.pending[source][row].clone().split(args.head_dim)
            arrays[f"pending_a.{source}"] = value.unsqueeze(0)
            arrays[f"pending_g.{source}"] = gate.unsqueeze(0)
    return arrays


class DraftTrace:
    """What the draft steps after decode steps gave."""

    def __init__(self, model: DeepseekV41) -> None:
        self.model = model
        self.parts: dict[str, list[Tensor]] = {}
        self.first: dict[str, Arrays] | None = None

    def add(
        self, position: int, best: int, draft: Draft, taps: Tensor | None, note: dict[str, Arrays]
    ) -> None:
        """One draft: after `position`, whose own greedy token is `best`."""
        drafter, size = self.model.drafter, self.model.args.dspark_block_size
        assert drafter is not None
        tap = _some(taps)[:1]
        found = {
            "position": torch.tensor(position, dtype=torch.int32),
            "tokens": torch.tensor([best, *draft.token_ids], dtype=torch.int32),
            "main_hidden": tap[0],
            "main_x": drafter.condition(tap.expand(2, -1))[0],
            "hidden": draft.hidden,
            "base_logits": draft.base_logits,
            "logits": draft.logits,
            "confidence": draft.confidence,
        }
        for number, arrays in enumerate(note.values()):
            found[f"experts.M{number}"] = arrays["experts"][:size].int()
            found[f"weights.M{number}"] = arrays["weights"][:size]
        for name, value in found.items():
            self.parts.setdefault(name, []).append(value)
        if self.first is None:
            self.first = note

    def put_into(self, out: Replay) -> None:
        for name, parts in self.parts.items():
            out.put("dspark", name, torch.stack(parts))
        for number, arrays in enumerate((self.first or {}).values()):
            for name in _DRAFT_NAMES:
                value = arrays[name][: self.model.args.dspark_block_size]
                value = value.squeeze(1) if name == "premix_in" else value
                out.put("dspark", f"step0.M{number}.{name}", value)
