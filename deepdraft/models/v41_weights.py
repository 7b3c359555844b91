"""Weights of a V4.1 model as the kernels read them: re-tiled once, on the device.

Owns: which published tensors are read together, and their tiling (`kernels.layout`). Sizes that
tensor parallelism divides (heads, groups, expert width, vocabulary) are taken from the tensors, so
a source that gives one rank's slices gives that rank's weights.
Knows nothing of: files, rows, state.

Letters: D hidden, S streams, F expert width, E experts, V vocabulary, C head width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.errors import ConfigError
from deepdraft.kernels import layout
from deepdraft.kernels.layout import Tiled
from deepdraft.kernels.native import fragments, stream
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.models.layers import WeightSource
from deepdraft.ops.engram_hash import engram_tables

Weight = Tiled | Streamed
"""A quantised matrix in the order its kernel reads: Triton's, or CUDA C++'s where that is built."""

_EXPERTS_AT_ONCE = 16
"""Experts re-tiled together: bounds the memory that unpacked codes take."""


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Residual-mix coefficients: fn float32 [(2 + S) S, S D], base [(2 + S) S], scale [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Router, routed experts and the shared one."""

    gate: Tiled
    bias: Tensor
    w13: Weight
    w2: Weight
    shared13: Weight
    shared2: Weight
    picks: int


@dataclass(frozen=True, slots=True)
class EntryWeights:
    """What makes main KV entries and index keys: norm [C], wk [Ci, C], k_norm [Ci]."""

    norm: Tensor
    wk: Tiled
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's projections. `w_in`: query latent, then window KV; `w_query`: heads, then index
    heads; `raw`: compressor value, gate (ratio 2), index head weights, as far as there are."""

    w_in: Weight
    q_norm: Tensor
    kv_norm: Tensor
    w_query: Weight
    sink: Tensor
    wo_a: Weight
    groups: int
    wo_b: Weight
    raw: Tiled | None = None
    entry: EntryWeights | None = None


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Table rows (on the device, or in pinned host memory), their map, gate float32 [S, D]."""

    values: Tensor
    scales: Tensor
    wkv: Weight
    gate: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block of the backbone or the drafter."""

    attn_norm: Tensor
    ffn_norm: Tensor
    attention: AttentionWeights
    experts: ExpertWeights
    mix_attn: MixWeights
    mix_ffn: MixWeights
    engram: EngramWeights | None = None


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """The drafter's layers and what stands around them. `ring_kv`: the layers' window KV maps, one
    after another; confidence float32 [D + rank]."""

    layers: tuple[LayerWeights, ...]
    main_proj: Weight
    main_norm: Tensor
    ring_kv: Weight
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tiled
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class HashTables:
    """Constants of the Engram hash on the device (`kernels.rows.engram_rows`)."""

    token_map: Tensor
    factors: Tensor
    primes: Tensor
    offsets: Tensor
    sizes: Tensor
    pad: int


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything a step reads."""

    args: V41Args
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tiled
    drafter: DrafterWeights | None
    hash: HashTables | None

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self.embed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, Engram tables in host memory not counted."""
        return _device_bytes(self, self.device)


def _device_bytes(part: object, device: torch.device) -> int:
    if isinstance(part, Tensor):
        return part.nbytes if part.device == device else 0
    if isinstance(part, tuple):
        return sum(_device_bytes(p, device) for p in part)
    if is_dataclass(part):
        return sum(_device_bytes(getattr(part, f.name), device) for f in fields(part))
    return 0


class _Loader:
    """Published names in, tiled weights on one device out."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self.source, self.device = source, device

    def vector(self, name: str) -> Tensor:
        """A norm, bias, sink or table as float32."""
        return self.source.tensor(name, torch.float32).to(self.device).contiguous()

    def half(self, name: str) -> Tensor:
        """A bf16 table as stored."""
        return self.source.packed(name).values.to(self.device, torch.bfloat16).contiguous()

    def fp8(self, *names: str, blocks: int = 1) -> Weight:
        """FP8 maps that share their input, one after another."""
        values, scales = self._stored(names)
        plan = stream.dense_plan(self.device, values.shape[0], values.shape[1], blocks)
        if plan is not None:
            return fragments.stream_fp8(values, scales, plan)
        return layout.tile_fp8(values, scales, blocks=blocks)

    def bf16(self, *names: str) -> Tiled:
        """bf16 maps that share their input, one after another."""
        return layout.tile_bf16(torch.cat([self.half(name) for name in names]))

    def _stored(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        parts = [self.source.packed(name) for name in names]
        values = [p.values.view(torch.uint8).to(self.device) for p in parts]
        scales = []
        for name, part in zip(names, parts, strict=True):
            if part.scales is None:
                raise ConfigError(
                    f"{name} has no scales: the kernels take the published formats (FP8 in 32 x 32 "
                    "tiles, MXFP4 experts); run this checkpoint with --device cpu"
                )
            scales.append(part.scales.view(torch.uint8).to(self.device))
        return torch.cat(values), torch.cat(scales)

    def experts(self, prefix: str, count: int) -> tuple[Weight, Weight]:
        """Routed experts: gate and up interleaved [E, 2F, D], down [E, D, F]."""
        up: list[Weight] = []
        down: list[Weight] = []
        for first in range(0, count, _EXPERTS_AT_ONCE):
            some = range(first, min(first + _EXPERTS_AT_ONCE, count))
            names = [[f"{prefix}.experts.{e}.{w}.weight" for e in some] for w in ("w1", "w3", "w2")]
            gate, rise, fall = (self._stacked(n) for n in names)
            width, hidden = gate[0].shape[1], 2 * gate[0].shape[2]
            if (plans := stream.expert_plans(self.device, hidden, width)) is not None:
                up.append(fragments.stream_gate_up(gate, rise, plans[0]))
                down.append(fragments.stream_mxfp4(*fall, plans[1]))
                continue
            tile = layout.expert_plan(2 * width, hidden).tile
            both = [layout.interleave_pair(a, b, tile) for a, b in zip(gate, rise, strict=True)]
            up.append(layout.tile_mxfp4(both[0], both[1]))
            down.append(layout.tile_mxfp4(*fall))
        return _joined(up, count), _joined(down, count)

    def _stacked(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        values, scales = self._stored(names)
        shape = (len(names), -1)
        return values.view(*shape, values.shape[1]), scales.view(*shape, scales.shape[1])


def _joined(parts: list[Weight], count: int) -> Weight:
    """The parts of an expert matrix as one; each is let go once it is copied."""
    one = parts[0]
    assert one.scales is not None
    values = one.values.new_empty(count, *one.values.shape[1:])
    scales = one.scales.new_empty(count, *one.scales.shape[1:])
    at = 0
    while parts:
        part = parts.pop(0)
        assert part.scales is not None
        n = part.values.shape[0]
        values[at : at + n], scales[at : at + n] = part.values, part.scales
        at += n
    return replace(one, values=values, scales=scales)


def _attention(load: _Loader, args: V41Args, prefix: str, layer: int | None) -> AttentionWeights:
    """`layer` None: a drafter layer."""
    raw: list[str] = []
    query = [f"{prefix}.wq_b.weight"]
    entry = None
    role = None if layer is None else args.roles[layer]
    if role is not None and role.owns_kv:
        raw.append(f"{prefix}.compressor.wkv.weight")
        if role.ratio == 2:
            raw.append(f"{prefix}.compressor.wgate.weight")
        entry = EntryWeights(
            load.vector(f"{prefix}.compressor.norm.weight"),
            load.bf16(f"{prefix}.indexer.wk.weight"),
            load.vector(f"{prefix}.indexer.k_norm.weight"),
        )
    if role is not None and role.runs_indexer:
        raw.append(f"{prefix}.indexer.weights_proj.weight")
        query.append(f"{prefix}.indexer.wq_b.weight")
    sink = load.vector(f"{prefix}.attn_sink")
    groups = args.o_groups * sink.shape[0] // args.num_attention_heads
    return AttentionWeights(
        w_in=load.fp8(f"{prefix}.wq_a.weight", f"{prefix}.wkv.weight"),
        q_norm=load.vector(f"{prefix}.q_norm.weight"),
        kv_norm=load.vector(f"{prefix}.kv_norm.weight"),
        w_query=load.fp8(*query),
        sink=sink,
        wo_a=load.fp8(f"{prefix}.wo_a.weight", blocks=groups),
        groups=groups,
        wo_b=load.fp8(f"{prefix}.wo_b.weight"),
        raw=load.bf16(*raw) if raw else None,
        entry=entry,
    )


def _experts(load: _Loader, prefix: str, count: int, picks: int) -> ExpertWeights:
    w13, w2 = load.experts(prefix, count)
    shared13, shared2 = _shared_expert(load, prefix)
    return ExpertWeights(
        gate=load.bf16(f"{prefix}.gate.weight"),
        bias=load.vector(f"{prefix}.gate.bias"),
        w13=w13,
        w2=w2,
        shared13=shared13,
        shared2=shared2,
        picks=picks,
    )


def _shared_expert(load: _Loader, prefix: str) -> tuple[Weight, Weight]:
    shared = f"{prefix}.shared_experts"
    up = load.fp8(f"{shared}.w1.weight", f"{shared}.w3.weight")
    return up, load.fp8(f"{shared}.w2.weight")


def _mix(load: _Loader, prefix: str) -> MixWeights:
    return MixWeights(*(load.vector(f"{prefix}_{part}") for part in ("fn", "base", "scale")))


def _layer(load: _Loader, args: V41Args, layer: int, *, tables_on_host: bool) -> LayerWeights:
    prefix = f"layers.{layer}"
    return LayerWeights(
        attn_norm=load.vector(f"{prefix}.attn_norm.weight"),
        ffn_norm=load.vector(f"{prefix}.ffn_norm.weight"),
        attention=_attention(load, args, f"{prefix}.attn", layer),
        experts=_experts(load, f"{prefix}.ffn", args.n_routed_experts, args.num_experts_per_tok),
        mix_attn=_mix(load, f"{prefix}.hc_attn"),
        mix_ffn=_mix(load, f"{prefix}.hc_ffn"),
        engram=(
            _engram(load, args, f"{prefix}.engram", on_host=tables_on_host)
            if args.roles[layer].engram
            else None
        ),
    )


def _engram(load: _Loader, args: V41Args, prefix: str, *, on_host: bool) -> EngramWeights:
    table = load.source.packed(f"{prefix}.embed.weight")
    if table.scales is None:
        raise ConfigError(f"{prefix}.embed.weight has no scales: Engram rows are E4M3 with E8M0")
    values, scales = table.values.view(torch.uint8), table.scales.view(torch.uint8)
    if on_host and load.device.type == "cuda":
        values, scales = (t if t.is_pinned() else t.pin_memory() for t in (values, scales))
    else:
        values, scales = values.to(load.device), scales.to(load.device)
    gate = load.vector(f"{prefix}.q_weight") * load.vector(f"{prefix}.k_weight")
    return EngramWeights(
        values, scales, load.fp8(f"{prefix}.wkv.weight"), gate * args.hidden_size**-0.5
    )


def _drafter(load: _Loader, args: V41Args) -> DrafterWeights:
    count = args.num_nextn_predict_layers
    layers = []
    for number in range(count):
        prefix = f"mtp.{number}"
        layers.append(
            LayerWeights(
                attn_norm=load.vector(f"{prefix}.attn_norm.weight"),
                ffn_norm=load.vector(f"{prefix}.ffn_norm.weight"),
                attention=_attention(load, args, f"{prefix}.attn", None),
                experts=_experts(
                    load,
                    f"{prefix}.ffn",
                    args.dspark_n_routed_experts,
                    args.dspark_num_experts_per_tok,
                ),
                mix_attn=_mix(load, f"{prefix}.hc_attn"),
                mix_ffn=_mix(load, f"{prefix}.hc_ffn"),
            )
        )
    last = f"mtp.{count - 1}"
    return DrafterWeights(
        layers=tuple(layers),
        main_proj=load.fp8("mtp.0.main_proj.weight"),
        main_norm=load.vector("mtp.0.main_norm.weight"),
        ring_kv=load.fp8(*(f"mtp.{n}.attn.wkv.weight" for n in range(count))),
        norm=load.vector(f"{last}.norm.weight"),
        markov_embed=load.half(f"{last}.markov_head.embed.weight"),
        markov_head=load.bf16(f"{last}.markov_head.head.weight"),
        confidence=load.vector(f"{last}.confidence_head.proj.weight").view(-1),
    )


def _hash_tables(args: V41Args, token_map: Sequence[int], device: torch.device) -> HashTables:
    tables = engram_tables(args)
    sizes = list(args.engram_num_embeddings)  # of whole tables, also where a rank holds parts
    return HashTables(
        token_map=torch.tensor(list(token_map), dtype=torch.int32, device=device),
        factors=torch.from_numpy(tables.multipliers).to(device),
        primes=torch.from_numpy(tables.primes).to(device),
        offsets=torch.from_numpy(tables.offsets).to(device),
        sizes=torch.tensor(sizes, dtype=torch.int64, device=device),
        pad=token_map[args.engram_pad_token_id],
    )


def with_whole_maps(
    layer: LayerWeights, number: int, source: WeightSource, args: V41Args
) -> LayerWeights:
    """One of several ranks' `number`th layer with attention, shared expert and Engram map from
    `source`, which has them whole; all else is shared with `layer`."""
    load, old = _Loader(source, layer.attn_norm.device), layer.attention
    prefix = f"layers.{number}"
    attention = replace(
        _attention(load, args, f"{prefix}.attn", number),
        w_in=old.w_in, q_norm=old.q_norm, kv_norm=old.kv_norm, raw=old.raw, entry=old.entry,
    )  # fmt: skip
    shared13, shared2 = _shared_expert(load, f"{prefix}.ffn")
    engram = layer.engram
    if engram is not None:
        engram = replace(engram, wkv=load.fp8(f"{prefix}.engram.wkv.weight"))
    return replace(
        layer,
        attention=attention,
        experts=replace(layer.experts, shared13=shared13, shared2=shared2),
        engram=engram,
    )


def load_weights(
    args: V41Args,
    source: WeightSource,
    token_map: Sequence[int] | None,
    *,
    device: torch.device | str,
    drafter: bool = True,
    tables_on_host: bool = True,
    behind: Callable[[int, LayerWeights], None] | None = None,
) -> ModelWeights:
    """Read and re-tile every weight. `token_map`: compressed id of each token, where the model has
    Engram layers. `tables_on_host`: their tables stay in pinned host memory. `behind`: called with
    each layer of the backbone as soon as it is there, while its file is at hand.

    Raises ConfigError for a checkpoint whose tensors are not in the published formats.
    """
    if args.engram_layer_ids and token_map is None:
        raise ConfigError("this model has Engram layers and needs the tokenizer's token map")
    device = torch.device(device)
    load = _Loader(source, device)
    layers = []
    for i in range(args.num_hidden_layers):
        layers.append(_layer(load, args, i, tables_on_host=tables_on_host))
        if behind is not None:
            behind(i, layers[-1])
    return ModelWeights(
        args=args,
        embed=load.half("embed.weight"),
        layers=tuple(layers),
        norm=load.vector("norm.weight"),
        head=load.bf16("head.weight"),
        drafter=_drafter(load, args) if drafter and args.num_nextn_predict_layers else None,
        hash=(
            _hash_tables(args, token_map, device)
            if args.engram_layer_ids and token_map is not None
            else None
        ),
    )
