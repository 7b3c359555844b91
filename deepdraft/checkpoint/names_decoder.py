"""Every tensor of a Llama, V2, V3 or V3.2 checkpoint: names as published, shapes from the sizes.

Owns: the tables of names and shapes. Formats are open: any linear map may be stored in BF16, F16,
F32 or FP8 blocks (`resolve`). Knows nothing of: files, torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs
from deepdraft.checkpoint.names import Entry, Module

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Names:
    """Makes entries below one prefix; unread modules count as one group."""

    prefix: str
    module: Module = "text"
    optional: str = ""

    def plain(self, suffix: str, shape: Shape, group: str, *, optional: str = "") -> Entry:
        label = optional or self.optional
        return Entry(
            self.prefix + suffix, shape, "plain", self._group(group), self.module, optional=label
        )

    def linear(self, suffix: str, shape: Shape, group: str) -> Entry:
        name = f"{self.prefix}{suffix}.weight"
        scale = f"{name}_scale_inv"
        return Entry(name, shape, "weight", self._group(group), self.module, scale, self.optional)

    def mlp(self, suffix: str, hidden: int, width: int, group: str) -> Iterator[Entry]:
        yield self.linear(f"{suffix}.gate_proj", (width, hidden), group)
        yield self.linear(f"{suffix}.up_proj", (width, hidden), group)
        yield self.linear(f"{suffix}.down_proj", (hidden, width), group)

    def _group(self, group: str) -> str:
        return "MTP" if self.module == "mtp" else group


def llama_entries(args: LlamaArgs) -> Iterator[Entry]:
    """The table of a Llama checkpoint."""
    yield from _ends(args)
    d, c = args.hidden_size, args.head_dim
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    attn = "attention projections"
    for layer in range(args.num_hidden_layers):
        names = _Names(f"model.layers.{layer}.")
        yield from _norms(names, d)
        yield names.linear("self_attn.q_proj", (heads * c, d), attn)
        yield names.linear("self_attn.k_proj", (kv_heads * c, d), attn)
        yield names.linear("self_attn.v_proj", (kv_heads * c, d), attn)
        yield names.linear("self_attn.o_proj", (d, heads * c), attn)
        yield from names.mlp("mlp", d, args.intermediate_size, "MLPs")
        yield _Names(f"model.layers.{layer}.", "derived").plain(
            "self_attn.rotary_emb.inv_freq", (c // 2,), "derived", optional=f"inv_freq {layer}"
        )


def mla_entries(args: DeepseekV2Args | DeepseekV3Args) -> Iterator[Entry]:
    """The table of a V2, V3 or V3.2 checkpoint, next-token prediction layers included."""
    yield from _ends(args)
    for layer in range(args.num_hidden_layers):
        names = _Names(f"model.layers.{layer}.")
        yield from _mla_layer(args, names, dense=args.is_dense(layer))
    if not isinstance(args, DeepseekV3Args):
        return
    d, first = args.hidden_size, args.num_hidden_layers
    for number in range(args.num_nextn_predict_layers):
        names = _Names(f"model.layers.{first + number}.", "mtp", f"mtp {number}")
        yield from _mla_layer(args, names, dense=False)
        for suffix in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            yield names.plain(suffix, (d,), "")
        yield names.linear("eh_proj", (d, 2 * d), "")
        # Copies of the model's own embedding and head, which some exports leave out.
        for suffix in ("embed_tokens.weight", "shared_head.head.weight"):
            yield names.plain(suffix, (args.vocab_size, d), "", optional=f"{suffix} {number}")


def _ends(args: LlamaArgs | DeepseekV2Args | DeepseekV3Args) -> Iterator[Entry]:
    names, group = _Names(""), "embed and head"
    shape = (args.vocab_size, args.hidden_size)
    yield names.plain("model.embed_tokens.weight", shape, group)
    yield names.plain("model.norm.weight", shape[1:], "norms")
    tied = "tied head" if args.tie_word_embeddings else ""
    yield names.plain("lm_head.weight", shape, group, optional=tied)


def _norms(names: _Names, hidden: int) -> Iterator[Entry]:
    yield names.plain("input_layernorm.weight", (hidden,), "norms")
    yield names.plain("post_attention_layernorm.weight", (hidden,), "norms")


def _mla_layer(
    args: DeepseekV2Args | DeepseekV3Args, names: _Names, *, dense: bool
) -> Iterator[Entry]:
    d, heads, rank = args.hidden_size, args.num_attention_heads, args.kv_lora_rank
    query = heads * (args.qk_nope_head_dim + args.qk_rope_head_dim)
    attn = "attention projections"
    yield from _norms(names, d)
    if args.q_lora_rank is None:
        yield names.linear("self_attn.q_proj", (query, d), attn)
    else:
        yield names.linear("self_attn.q_a_proj", (args.q_lora_rank, d), attn)
        yield names.plain("self_attn.q_a_layernorm.weight", (args.q_lora_rank,), "norms")
        yield names.linear("self_attn.q_b_proj", (query, args.q_lora_rank), attn)
    width = rank + args.qk_rope_head_dim
    yield names.linear("self_attn.kv_a_proj_with_mqa", (width, d), attn)
    yield names.plain("self_attn.kv_a_layernorm.weight", (rank,), "norms")
    expanded = heads * (args.qk_nope_head_dim + args.v_head_dim)
    yield names.linear("self_attn.kv_b_proj", (expanded, rank), attn)
    yield names.linear("self_attn.o_proj", (d, heads * args.v_head_dim), attn)
    if isinstance(args, DeepseekV3Args) and args.index_topk:
        yield from _indexer(args, names)
    if dense:
        yield from names.mlp("mlp", d, args.intermediate_size, "dense MLPs")
        return
    experts, width = args.router.experts, args.moe_intermediate_size
    yield names.plain("mlp.gate.weight", (experts, d), "routers")
    if args.router.biased:
        yield names.plain("mlp.gate.e_score_correction_bias", (experts,), "routers")
    for expert in range(experts):
        yield from names.mlp(f"mlp.experts.{expert}", d, width, "routed experts")
    shared = width * args.n_shared_experts
    yield from names.mlp("mlp.shared_experts", d, shared, "shared experts")


def _indexer(args: DeepseekV3Args, names: _Names) -> Iterator[Entry]:
    d, width, group = args.hidden_size, args.index_head_dim, "indexers"
    assert args.q_lora_rank is not None
    stem = "self_attn.indexer"
    yield names.linear(f"{stem}.wq_b", (args.index_n_heads * width, args.q_lora_rank), group)
    yield names.linear(f"{stem}.wk", (width, d), group)
    yield names.plain(f"{stem}.k_norm.weight", (width,), group)
    yield names.plain(f"{stem}.k_norm.bias", (width,), group)
    yield names.plain(f"{stem}.weights_proj.weight", (args.index_n_heads, d), group)
