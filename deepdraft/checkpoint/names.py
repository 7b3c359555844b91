"""Every tensor of a DeepSeek-V4.1 checkpoint: name, stored shape, format, accounting group.

Owns: the published names (architecture notes 1.2), as one table generated from `V41Args`, and the
named rules by which a tensor of the table may stay unread.
Knows nothing of: files, torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from deepdraft.arch import V41Args

Format = Literal[
    "bf16",
    "f16",
    "f32",
    "fp8_tile",
    "fp8_row",
    "fp8_block",
    "mxfp4",
    "scale",
    "block_scale",
    "i32",
    "i64",
    "plain",
    "weight",
    "ids",
]
"""How values are stored. `fp8_tile`: E4M3 with one E8M0 scale per 32x32 tile; `fp8_row`: E4M3 with
one per 32 along the row; `fp8_block`: E4M3 with one scale per 128x128 block; `mxfp4`: two E2M1 a
byte with one per 32 along the row; `scale`: the E8M0 bytes of a weight; `block_scale`: F32 factors
of an `fp8_block` weight. `plain`, `weight` and `ids` are not known before the files are read
(`deepdraft.checkpoint.resolve`)."""

Module = Literal["text", "drafter", "vision", "mtp", "derived"]

STORED_DTYPES: dict[Format, tuple[str, ...]] = {
    "bf16": ("BF16",),
    "f32": ("F32",),
    "fp8_tile": ("F8_E4M3",),
    "fp8_row": ("F8_E4M3",),
    "mxfp4": ("I8", "U8"),
    "scale": ("F8_E8M0", "U8"),
    "f16": ("F16",),
    "fp8_block": ("F8_E4M3",),
    "block_scale": ("F32",),
    "i32": ("I32",),
    "i64": ("I64",),
    "plain": ("BF16", "F16", "F32"),
    "weight": ("BF16", "F16", "F32", "F8_E4M3"),
    "ids": ("I64", "I32"),
}
"""Safetensors dtypes in which a format may be stored; the first one is written."""

SKIP_RULES: dict[str, str] = {
    "vision": "the vision tower (vision.*, aligner.*, image_*) stays unread: image input is not "
    "supported yet",
    "mtp": "drafter layers (V3, V3.2, V4) are read to draft only",
    "derived": "rotary frequencies are computed from config.json, stored copies stay unread",
}
"""Modules whose tensors are checked but never read, and why."""

_ITEM_BYTES: dict[Format, int] = {
    "bf16": 2,
    "f32": 4,
    "fp8_tile": 1,
    "fp8_row": 1,
    "mxfp4": 1,
    "scale": 1,
    "f16": 2,
    "fp8_block": 1,
    "block_scale": 4,
    "i32": 4,
    "i64": 8,
    "plain": 2,
    "weight": 2,
    "ids": 8,
}
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the checkpoint as it is stored."""

    name: str
    shape: tuple[int, ...]
    """As stored: the last axis of an `mxfp4` tensor counts bytes."""
    format: Format
    group: str
    """Row of the parameter table (architecture notes 1.3)."""
    module: Module
    scale: str | None = None
    """Name of its scale tensor where that is not the weight's stem and `scale`."""
    optional: str = ""
    """Entries of one such label may be absent together."""

    @property
    def dtype(self) -> str:
        """The safetensors dtype in which it is published."""
        return STORED_DTYPES[self.format][0]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.format]

    @property
    def num_params(self) -> int:
        """Parameters it holds; 0 for scales, two a byte for `mxfp4`."""
        if self.format in ("scale", "block_scale"):
            return 0
        return prod(self.shape) * (2 if self.format == "mxfp4" else 1)

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape after dequantisation."""
        if self.format != "mxfp4":
            return self.shape
        return (*self.shape[:-1], 2 * self.shape[-1])

    @property
    def scale_name(self) -> str | None:
        """Name of its scale tensor, None for formats without one."""
        if self.scale is not None:
            return self.scale
        if self.format in ("fp8_tile", "fp8_row", "mxfp4"):
            return f"{self.name.removesuffix('weight')}scale"
        return None


def tensor_table(args: V41Args) -> dict[str, Entry]:
    """Name -> entry for every tensor that a checkpoint of this configuration holds."""
    table: dict[str, Entry] = {}
    for entry in _all_entries(args):
        assert entry.name not in table, entry.name
        table[entry.name] = entry
    return table


def _all_entries(args: V41Args) -> Iterator[Entry]:
    d = args.hidden_size
    yield Entry("embed.weight", (args.vocab_size, d), "bf16", "embed and head", "text")
    for layer in range(args.num_hidden_layers):
        yield from _Block(args, f"layers.{layer}.", "text").backbone(layer)
    for layer in range(args.num_nextn_predict_layers):
        yield from _Block(args, f"mtp.{layer}.", "drafter").drafter(layer)
    yield Entry("norm.weight", (d,), "bf16", "norms and sinks", "text")
    yield Entry("head.weight", (args.vocab_size, d), "bf16", "embed and head", "text")
    if args.vision:
        yield from _vision(args)


@dataclass(frozen=True)
class _Block:
    """Entries of one transformer block; drafter blocks count as one group, `DSpark`."""

    args: V41Args
    prefix: str
    module: Module

    def plain(self, suffix: str, shape: tuple[int, ...], fmt: Format, group: str) -> Entry:
        group = "DSpark" if self.module == "drafter" else group
        return Entry(self.prefix + suffix, shape, fmt, group, self.module)

    def scaled(self, stem: str, shape: tuple[int, int], fmt: Format, group: str) -> Iterator[Entry]:
        """A weight of logical `shape` [out, in] and its scales."""
        out, width = shape
        stored = (out, width // 2) if fmt == "mxfp4" else shape
        scale_rows = -(-out // _GROUP) if fmt == "fp8_tile" else out
        yield self.plain(f"{stem}.weight", stored, fmt, group)
        yield self.plain(f"{stem}.scale", (scale_rows, -(-width // _GROUP)), "scale", group)

    def backbone(self, layer: int) -> Iterator[Entry]:
        role = self.args.roles[layer]
        yield from self.common(self.args.n_routed_experts)
        if role.owns_kv:
            yield from self.compressor(gated=role.ratio > 1)
        if role.runs_indexer:
            yield from self.indexer(owns_keys=role.owns_kv)
        if role.engram:
            rows = self.args.engram_num_embeddings[self.args.engram_layer_ids.index(layer)]
            yield from self.engram(rows)

    def common(self, num_experts: int) -> Iterator[Entry]:
        args = self.args
        d, dim, q_rank, width = (
            args.hidden_size,
            args.head_dim,
            args.q_lora_rank,
            args.moe_intermediate_size,
        )
        heads = args.num_attention_heads
        group_width = heads * dim // args.o_groups
        attn, norms = "attention projections", "norms and sinks"
        yield self.plain("attn_norm.weight", (d,), "bf16", norms)
        yield self.plain("ffn_norm.weight", (d,), "bf16", norms)
        yield from self.scaled("attn.wq_a", (q_rank, d), "fp8_tile", attn)
        yield self.plain("attn.q_norm.weight", (q_rank,), "bf16", norms)
        yield from self.scaled("attn.wq_b", (heads * dim, q_rank), "fp8_tile", attn)
        yield from self.scaled("attn.wkv", (dim, d), "fp8_tile", attn)
        yield self.plain("attn.kv_norm.weight", (dim,), "bf16", norms)
        yield self.plain("attn.attn_sink", (heads,), "f32", norms)
        lora = args.o_groups * args.o_lora_rank
        yield from self.scaled("attn.wo_a", (lora, group_width), "fp8_tile", attn)
        yield from self.scaled("attn.wo_b", (d, lora), "fp8_tile", attn)
        mixes = args.hc_mult * (2 + args.hc_mult)
        for part in ("attn", "ffn"):
            yield self.plain(f"hc_{part}_fn", (mixes, args.hc_mult * d), "f32", "mHC")
            yield self.plain(f"hc_{part}_base", (mixes,), "f32", "mHC")
            yield self.plain(f"hc_{part}_scale", (3,), "f32", "mHC")
        yield self.plain("ffn.gate.weight", (num_experts, d), "bf16", "routers")
        yield self.plain("ffn.gate.bias", (num_experts,), "f32", "routers")
        yield self.plain("ffn.gate.bias_vl", (num_experts,), "f32", "routers")
        for expert in range(num_experts):
            for part in ("w1", "w2", "w3"):
                shape = (d, width) if part == "w2" else (width, d)
                stem = f"ffn.experts.{expert}.{part}"
                yield from self.scaled(stem, shape, "mxfp4", "routed experts")
        for part in ("w1", "w2", "w3"):
            shape = (d, width) if part == "w2" else (width, d)
            stem = f"ffn.shared_experts.{part}"
            yield from self.scaled(stem, shape, "fp8_tile", "shared experts")

    def compressor(self, *, gated: bool) -> Iterator[Entry]:
        shape = (self.args.head_dim, self.args.hidden_size)
        stem, group = "attn.compressor", "compressors"
        yield self.plain(f"{stem}.wkv.weight", shape, "bf16", group)
        if gated:
            yield self.plain(f"{stem}.wgate.weight", shape, "bf16", group)
        yield self.plain(f"{stem}.norm.weight", shape[:1], "bf16", group)

    def indexer(self, *, owns_keys: bool) -> Iterator[Entry]:
        args = self.args
        heads, dim = args.index_n_heads, args.index_head_dim
        stem, group = "attn.indexer", "indexers"
        yield from self.scaled(f"{stem}.wq_b", (heads * dim, args.q_lora_rank), "fp8_tile", group)
        shape = (heads, args.hidden_size)
        yield self.plain(f"{stem}.weights_proj.weight", shape, "bf16", group)
        if owns_keys:
            yield self.plain(f"{stem}.wk.weight", (dim, args.head_dim), "bf16", group)
            yield self.plain(f"{stem}.k_norm.weight", (dim,), "bf16", group)

    def engram(self, rows: int) -> Iterator[Entry]:
        args = self.args
        streams, d = args.hc_mult, args.hidden_size
        group = "Engram projections and gates"
        width = (args.engram_max_ngram_size - 1) * args.engram_n_heads * args.engram_head_dim
        yield from self.scaled(
            "engram.embed", (rows, args.engram_head_dim), "fp8_row", "Engram tables"
        )
        yield from self.scaled("engram.wkv", ((streams + 1) * d, width), "fp8_tile", group)
        yield self.plain("engram.q_weight", (streams, d), "bf16", group)
        yield self.plain("engram.k_weight", (streams, d), "bf16", group)

    def drafter(self, layer: int) -> Iterator[Entry]:
        args = self.args
        d, rank = args.hidden_size, args.dspark_markov_rank
        yield from self.common(args.dspark_n_routed_experts)
        if layer == 0:
            width = d * len(args.dspark_target_layer_ids)
            yield from self.scaled("main_proj", (d, width), "fp8_tile", "")
            yield self.plain("main_norm.weight", (d,), "bf16", "")
        if layer == args.num_nextn_predict_layers - 1:
            yield self.plain("norm.weight", (d,), "bf16", "")
            yield self.plain("markov_head.embed.weight", (args.vocab_size, rank), "bf16", "")
            yield self.plain("markov_head.head.weight", (args.vocab_size, rank), "bf16", "")
            yield self.plain("confidence_head.proj.weight", (1, d + rank), "bf16", "")


def _vision(args: V41Args) -> Iterator[Entry]:
    sizes = dict(args.vision)
    d, width, out = sizes["hidden_size"], sizes["intermediate_size"], args.hidden_size
    patch = 3 * sizes["patch_size"] ** 2
    merged = d * sizes["downsample_ratio"] ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "image_start": (out,),
        "image_end": (out,),
        "image_newline": (out,),
        "vision.patch_embed.proj.weight": (d, patch),
        "vision.patch_embed.proj.bias": (d,),
        "vision.norm.weight": (d,),
        "aligner.w1.weight": (out, merged),
        "aligner.w1.bias": (out,),
        "aligner.w2.weight": (out, out),
        "aligner.w2.bias": (out,),
    }
    for layer in range(sizes["num_hidden_layers"]):
        block = f"vision.blocks.{layer}."
        shapes |= {
            f"{block}norm1.weight": (d,),
            f"{block}norm2.weight": (d,),
            f"{block}attn.wqkv.weight": (3 * d, d),
            f"{block}attn.wqkv.bias": (3 * d,),
            f"{block}attn.wo.weight": (d, d),
            f"{block}attn.wo.bias": (d,),
            f"{block}mlp.w1.weight": (2 * width, d),
            f"{block}mlp.w2.weight": (d, width),
        }
    for name, shape in shapes.items():
        yield Entry(name, shape, "bf16", "vision tower", "vision")
