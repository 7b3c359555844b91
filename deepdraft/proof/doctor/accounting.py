"""Names and shapes against the configuration: which single key explains a mismatch.

Owns: the structured accounting of tensors, the sizes that files show by themselves, and the search
for the key whose correction makes both agree. Knows nothing of: values, printing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, V4Args, V41Args
from deepdraft.checkpoint.families import model_table, unread_tensors
from deepdraft.checkpoint.names import STORED_DTYPES, Entry
from deepdraft.checkpoint.shards import Stored
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.errors import ConfigError

Stored_ = Mapping[str, Stored]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MAX_REPAIRS = 4
_MAX_SEARCHED = 300_000
"""Names up to which keys are tried: each try makes the table anew."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """What the files hold against what the configuration makes."""

    table: dict[str, Entry]
    missing: list[str]
    left_over: list[str]
    shapes: list[str]
    dtypes: list[str]

    @property
    def count(self) -> int:
        """Problems of names and shapes: those that a key can explain."""
        return len(self.missing) + len(self.left_over) + len(self.shapes)


@dataclass(frozen=True, slots=True)
class Repair:
    """A key whose value in the configuration is not the one that the files show."""

    key: str
    configured: Any
    shown: Any
    evidence: str
    explains: int
    """Problems that vanish with it."""
    left: int


def account(spec: ModelSpec, stored: Stored_) -> Accounts:
    """Compares names, shapes and dtypes."""
    args = spec.args
    table = model_table(args, stored)
    unread = set(unread_tensors(args, stored))
    shapes, dtypes = [], []
    for name, entry in table.items():
        place = stored.get(name)
        if place is None:
            continue
        if place.shape != entry.shape:
            shapes.append(name)
        if place.dtype not in STORED_DTYPES[entry.format]:
            dtypes.append(name)
    return Accounts(
        table,
        [name for name in table if name not in stored],
        [name for name in stored if name not in table and name not in unread],
        shapes,
        dtypes,
    )


def group_of(name: str) -> str:
    """A tensor's name with * for layer and expert numbers."""
    return _NUMBER.sub("*", name)


def by_group(names: list[str]) -> dict[str, list[str]]:
    """Names by group, in order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[group_of(name)].append(name)
    return dict(groups)


def find_repairs(spec: ModelSpec, stored: Stored_) -> tuple[list[Repair], ModelSpec, Accounts]:
    """Keys to correct, the best first; the corrected spec, and the problems that are left."""
    accounts = account(spec, stored)
    repairs: list[Repair] = []
    small = len(stored) + len(accounts.table) <= _MAX_SEARCHED
    while small and accounts.count and len(repairs) < _MAX_REPAIRS:
        best: tuple[int, Repair, ModelSpec, Accounts] | None = None
        for key, shown, evidence in shown_by_files(spec, stored):
            configured = _lookup(spec.config, key)
            if configured == shown:
                continue
            try:
                changed = spec.replaced(key, shown)
            except ConfigError:
                continue
            after = account(changed, stored)
            if after.count < accounts.count and (best is None or after.count < best[0]):
                explains = accounts.count - after.count
                repair = Repair(key, configured, shown, evidence, explains, after.count)
                best = after.count, repair, changed, after
        if best is None:
            break
        _, repair, spec, accounts = best
        repairs.append(repair)
    return repairs, spec, accounts


def _lookup(config: dict[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


Shown = Iterator[tuple[str, Any, str]]


def shown_by_files(spec: ModelSpec, stored: Stored_) -> Shown:
    """(key, value, evidence) for sizes that names and shapes show by themselves."""
    args: Any = spec.args
    if isinstance(args, V41Args):
        yield from _v41(args, _Names(stored, "layers."))
    elif isinstance(args, V4Args):
        yield from _v4(args, _Names(stored, "layers."))
    elif isinstance(args, LlamaArgs):
        yield from _llama(args, _Names(stored, "model.layers."))
    else:
        yield from _mla(args, _Names(stored, "model.layers."))


class _Names:
    """Look-ups in the headers."""

    def __init__(self, stored: Stored_, prefix: str) -> None:
        self.stored, self.prefix = stored, prefix
        numbers = {
            name[len(prefix) :].split(".", 1)[0] for name in stored if name.startswith(prefix)
        }
        self.layers = sorted(int(n) for n in numbers if n.isdigit())

    def shape(self, name: str) -> tuple[int, ...] | None:
        place = self.stored.get(name)
        return place.shape if place is not None and all(place.shape) else None

    def first(self, suffix: str) -> tuple[str, tuple[int, ...]] | None:
        """The first layer's tensor of this suffix."""
        for layer in self.layers:
            name = f"{self.prefix}{layer}.{suffix}"
            if (shape := self.shape(name)) is not None:
                return name, shape
        return None

    def has(self, layer: int, suffix: str) -> bool:
        return f"{self.prefix}{layer}.{suffix}" in self.stored

    def count(self, suffix: Callable[[int], str]) -> int:
        """How many of suffix(0), suffix(1), ... some layer has without a gap."""
        number = 0
        while self.first(suffix(number)) is not None:
            number += 1
        return number

    def rows(self, key: str, suffix: str, per: int = 1, axis: int = 0) -> Shown:
        """The key as a dimension of a tensor, in units of `per`."""
        if (found := self.first(suffix)) and per and found[1][axis] % per == 0:
            name, shape = found
            yield key, shape[axis] // per, f"{name} is {list(shape)}"


def _ends(names: _Names, embed: str, head: str, prefix: str = "") -> Shown:
    if shape := names.shape(embed):
        yield f"{prefix}vocab_size", shape[0], f"{embed} is {list(shape)}"
        yield f"{prefix}hidden_size", shape[1], f"{embed} is {list(shape)}"
    if head not in names.stored and not prefix:
        yield "tie_word_embeddings", True, f"there is no {head}"


def _layers(names: _Names, extra: int = 0, prefix: str = "") -> Shown:
    if names.layers:
        count = names.layers[-1] + 1
        evidence = f"the last layer in the files is {names.prefix}{count - 1}"
        yield f"{prefix}num_hidden_layers", count, evidence
        if 0 < extra < count:
            yield f"{prefix}num_hidden_layers", count - extra, evidence


def _llama(args: LlamaArgs, names: _Names) -> Shown:
    yield from _ends(names, "model.embed_tokens.weight", "lm_head.weight")
    yield from _layers(names)
    yield from names.rows("num_key_value_heads", "self_attn.k_proj.weight", args.head_dim)
    yield from names.rows("num_attention_heads", "self_attn.q_proj.weight", args.head_dim)
    yield from names.rows("head_dim", "self_attn.q_proj.weight", args.num_attention_heads)
    yield from names.rows("intermediate_size", "mlp.gate_proj.weight")


def _mla(args: DeepseekV2Args | DeepseekV3Args, names: _Names) -> Shown:
    nextn = getattr(args, "num_nextn_predict_layers", 0)
    yield from _ends(names, "model.embed_tokens.weight", "lm_head.weight")
    yield from _layers(names, nextn)
    if names.layers and names.layers[-1] >= args.num_hidden_layers:
        extra = names.layers[-1] + 1 - args.num_hidden_layers
        evidence = f"layers {args.num_hidden_layers} to {names.layers[-1]} are in the files"
        yield "num_nextn_predict_layers", extra, evidence
    dense = next((i for i in names.layers if names.has(i, "mlp.gate.weight")), len(names.layers))
    evidence = f"layer {dense} is the first with a router (mlp.gate.weight)"
    yield "first_k_dense_replace", dense, evidence
    yield from _mla_attention(args, names)
    yield from names.rows("n_routed_experts", "mlp.gate.weight")
    count = names.count(lambda e: f"mlp.experts.{e}.gate_proj.weight")
    yield "n_routed_experts", count, f"experts 0 to {count - 1} are in the files"
    yield from names.rows("moe_intermediate_size", "mlp.experts.0.gate_proj.weight")
    yield from names.rows("intermediate_size", "mlp.gate_proj.weight")
    width, shared = args.moe_intermediate_size, "mlp.shared_experts.gate_proj.weight"
    yield from names.rows("n_shared_experts", shared, width)
    yield from names.rows("index_n_heads", "self_attn.indexer.weights_proj.weight")
    yield from names.rows("index_head_dim", "self_attn.indexer.wk.weight")


def _mla_attention(args: DeepseekV2Args | DeepseekV3Args, names: _Names) -> Shown:
    nope, rope, v = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim
    heads = args.num_attention_heads
    at = "self_attn."
    yield from names.rows("q_lora_rank", f"{at}q_a_layernorm.weight")
    if found := names.first(f"{at}q_proj.weight"):
        yield "q_lora_rank", None, f"{found[0]} is there, q_a_proj is not"
    yield from names.rows("kv_lora_rank", f"{at}kv_a_layernorm.weight")
    if found := names.first(f"{at}kv_a_proj_with_mqa.weight"):
        name, shape = found
        yield "qk_rope_head_dim", shape[0] - args.kv_lora_rank, f"{name} is {list(shape)}"
    yield from names.rows("num_attention_heads", f"{at}kv_b_proj.weight", nope + v)
    yield from names.rows("v_head_dim", f"{at}o_proj.weight", heads, axis=1)
    query = f"{at}q_proj.weight" if args.q_lora_rank is None else f"{at}q_b_proj.weight"
    for key, suffix, less in (
        ("qk_nope_head_dim", query, rope),
        ("qk_rope_head_dim", query, nope),
        ("v_head_dim", f"{at}kv_b_proj.weight", nope),
    ):
        if (found := names.first(suffix)) and found[1][0] // heads > less:
            yield key, found[1][0] // heads - less, f"{found[0]} is {list(found[1])}"


def _v4(args: V4Args, names: _Names) -> Shown:
    yield from _ends(names, "embed.weight", "head.weight")
    yield from _layers(names)
    hashed = sum(names.has(i, "ffn.gate.tid2eid") for i in names.layers)
    yield "num_hash_layers", hashed, f"{hashed} layers have ffn.gate.tid2eid"
    kinds = {2: 4, 1: 128}
    ratios = []
    for layer in names.layers:
        ape = names.shape(f"layers.{layer}.attn.compressor.ape")
        ratios.append(kinds.get(ape[1] // args.head_dim, 0) if ape and len(ape) == 2 else 0)
    yield "compress_ratios", ratios, "attn.compressor.ape of each layer"
    yield from names.rows("n_routed_experts", "ffn.gate.weight")
    count = names.count(lambda e: f"ffn.experts.{e}.w1.weight")
    yield "n_routed_experts", count, f"experts 0 to {count - 1} are in the files"
    yield from names.rows("moe_intermediate_size", "ffn.shared_experts.w1.weight")
    yield from names.rows("q_lora_rank", "attn.q_norm.weight")
    yield from names.rows("head_dim", "attn.kv_norm.weight")
    yield from names.rows("num_attention_heads", "attn.attn_sink")
    yield from names.rows("o_lora_rank", "attn.wo_a.weight", args.o_groups)
    yield from names.rows("o_groups", "attn.wo_a.weight", args.o_lora_rank)
    yield from names.rows("index_n_heads", "attn.indexer.weights_proj.weight")
    yield from names.rows("index_head_dim", "attn.indexer.compressor.norm.weight")
    if found := names.first("ffn.gate.tid2eid"):
        yield "num_experts_per_tok", found[1][-1], f"{found[0]} is {list(found[1])}"
    if shape := names.shape("hc_head_base"):
        yield "hc_mult", shape[0], f"hc_head_base is {list(shape)}"


def _v41(args: V41Args, names: _Names) -> Shown:
    text = "text_config."
    yield from _ends(names, "embed.weight", "head.weight", text)
    yield from _layers(names, prefix=text)
    yield from names.rows(f"{text}n_routed_experts", "ffn.gate.weight")
    yield from names.rows(f"{text}moe_intermediate_size", "ffn.shared_experts.w1.weight")
    yield from names.rows(f"{text}q_lora_rank", "attn.q_norm.weight")
    yield from names.rows(f"{text}head_dim", "attn.kv_norm.weight")
    yield from names.rows(f"{text}num_attention_heads", "attn.attn_sink")
    yield from names.rows(f"{text}o_lora_rank", "attn.wo_a.weight", args.o_groups)
    yield from names.rows(f"{text}index_n_heads", "attn.indexer.weights_proj.weight")
    drafters = {n.split(".")[1] for n in names.stored if n.startswith("mtp.")}
    count = sum(d.isdigit() for d in drafters)
    yield f"{text}num_nextn_predict_layers", count, f"{count} layers mtp.* are in the files"
