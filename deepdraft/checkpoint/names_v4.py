"""Every tensor of a DeepSeek-V4 checkpoint: names as published, shapes from the sizes.

Formats are open: FP8 blocks, MXFP4 experts, BF16 or F32 (`resolve`). The drafter's tensors
(`mtp.*`) are DSpark layers or next-token prediction layers; may be absent as a whole. Knows nothing
of: files, torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from deepdraft.arch import V4Args
from deepdraft.checkpoint.names import Entry

Shape = tuple[int, ...]


def v4_entries(args: V4Args) -> Iterator[Entry]:
    """The table, drafter layers included."""
    d, s = args.hidden_size, args.hc_mult
    ends = "embed and head"
    yield _plain("embed.weight", (args.vocab_size, d), ends)
    tied = "tied head" if args.tie_word_embeddings else ""
    yield _plain("head.weight", (args.vocab_size, d), ends, optional=tied)
    yield _plain("norm.weight", (d,), "norms and sinks")
    for name, shape in (("fn", (s, s * d)), ("base", (s,)), ("scale", (1,))):
        yield _plain(f"hc_head_{name}", shape, "mHC")
    for layer in range(args.num_hidden_layers):
        yield from _layer(args, layer)
    drafter = [*_dspark(args)] if args.dspark_block_size else [*_prediction(args)]
    for entry in drafter:
        group = "MTP experts" if "experts" in entry.group else "MTP"
        label = entry.optional or "drafter layers"
        yield replace(entry, group=group, module="mtp", optional=label)


def _prediction(args: V4Args) -> Iterator[Entry]:
    """Window-only layers, each with two maps in front and a head mix and a norm behind it."""
    d, s = args.hidden_size, args.hc_mult
    for number in range(0 if args.drafter_compresses else args.num_nextn_predict_layers):
        at = f"mtp.{number}."
        yield from _block(args, at, "window", 0, hashed=False)
        yield _linear(f"{at}e_proj", (d, d), "")
        yield _linear(f"{at}h_proj", (d, d), "")
        for name in ("enorm", "hnorm", "norm"):
            yield _plain(f"{at}{name}.weight", (d,), "")
        for name, shape in (("fn", (s, s * d)), ("base", (s,)), ("scale", (1,))):
            yield _plain(f"{at}hc_head_{name}", shape, "")
        # Copies of the model's own embedding and head, which exports may hold.
        for name in ("emb.tok_emb.weight", "head.weight"):
            yield _plain(f"{at}{name}", (args.vocab_size, d), "", optional=f"{at}{name}")


def _dspark(args: V4Args) -> Iterator[Entry]:
    """Window-only layers with a map in front of the first and heads behind the last."""
    d, s, rank = args.hidden_size, args.hc_mult, args.dspark_markov_rank
    for number in range(args.num_nextn_predict_layers):
        yield from _block(args, f"mtp.{number}.", "window", 0, hashed=False)
    yield _linear("mtp.0.main_proj", (d, d * len(args.dspark_target_layer_ids)), "")
    yield _plain("mtp.0.main_norm.weight", (d,), "")
    at = f"mtp.{args.num_nextn_predict_layers - 1}."
    yield _plain(f"{at}norm.weight", (d,), "")
    for name, shape in (("fn", (s, s * d)), ("base", (s,)), ("scale", (1,))):
        yield _plain(f"{at}hc_head_{name}", shape, "")
    yield _plain(f"{at}markov_head.markov_w1.weight", (args.vocab_size, rank), "")
    yield _plain(f"{at}markov_head.markov_w2.weight", (args.vocab_size, rank), "")
    yield _plain(f"{at}confidence_head.proj.weight", (1, d + rank), "")


def v4_unread(args: V4Args, names: Iterable[str]) -> list[str]:
    """Those of `names` that belong to drafter layers of which nothing is known."""
    if not args.drafter_compresses:
        return []
    prefixes = tuple(f"mtp.{i}." for i in range(args.num_nextn_predict_layers))
    return [name for name in names if prefixes and name.startswith(prefixes)]


def _plain(name: str, shape: Shape, group: str, *, optional: str = "") -> Entry:
    return Entry(name, shape, "plain", group, "text", optional=optional)


def _linear(stem: str, shape: Shape, group: str) -> Entry:
    return Entry(f"{stem}.weight", shape, "weight", group, "text", f"{stem}.scale")


def _layer(args: V4Args, layer: int) -> Iterator[Entry]:
    kind, hashed = args.attention[layer], layer < args.num_hash_layers
    yield from _block(args, f"layers.{layer}.", kind, args.ratio(layer), hashed=hashed)


def _block(args: V4Args, at: str, kind: str, ratio: int, *, hashed: bool) -> Iterator[Entry]:
    d, s, width = args.hidden_size, args.hc_mult, args.head_dim
    mixes = s * (2 + s)
    for part in ("attn", "ffn"):
        yield _plain(f"{at}{part}_norm.weight", (d,), "norms and sinks")
        for name, shape in (("fn", (mixes, s * d)), ("base", (mixes,)), ("scale", (3,))):
            yield _plain(f"{at}hc_{part}_{name}", shape, "mHC")
    yield from _attention(args, f"{at}attn.")
    if kind != "window":
        overlap = 2 if kind == "csa" else 1
        stem = f"{at}attn.compressor"
        yield from _compressor(stem, d, overlap * width, width, ratio, "compressors")
    if kind == "csa":
        width, heads, stem = args.index_head_dim, args.index_n_heads, f"{at}attn.indexer"
        yield _linear(f"{stem}.wq_b", (heads * width, args.q_lora_rank), "indexers")
        yield _linear(f"{stem}.weights_proj", (heads, d), "indexers")
        stem += ".compressor"
        yield from _compressor(stem, d, 2 * width, width, args.csa_ratio, "indexers")
    yield from _experts(args, f"{at}ffn.", hashed=hashed)


def _attention(args: V4Args, at: str) -> Iterator[Entry]:
    d, c, heads, rank = args.hidden_size, args.head_dim, args.num_attention_heads, args.q_lora_rank
    group, norms = "attention projections", "norms and sinks"
    yield _linear(f"{at}wq_a", (rank, d), group)
    yield _plain(f"{at}q_norm.weight", (rank,), norms)
    yield _linear(f"{at}wq_b", (heads * c, rank), group)
    yield _linear(f"{at}wkv", (c, d), group)
    yield _plain(f"{at}kv_norm.weight", (c,), norms)
    yield _plain(f"{at}attn_sink", (heads,), norms)
    lora = args.o_groups * args.o_lora_rank
    yield _linear(f"{at}wo_a", (lora, heads * c // args.o_groups), group)
    yield _linear(f"{at}wo_b", (d, lora), group)


def _compressor(
    stem: str, hidden: int, out: int, width: int, ratio: int, group: str
) -> Iterator[Entry]:
    yield _linear(f"{stem}.wkv", (out, hidden), group)
    yield _linear(f"{stem}.wgate", (out, hidden), group)
    yield _plain(f"{stem}.ape", (ratio, out), group)
    yield _plain(f"{stem}.norm.weight", (width,), group)


def _experts(args: V4Args, at: str, *, hashed: bool) -> Iterator[Entry]:
    d, f, router = args.hidden_size, args.moe_intermediate_size, args.router
    yield _plain(f"{at}gate.weight", (router.experts, d), "routers")
    if hashed:
        table = (args.vocab_size, router.picks)
        yield Entry(f"{at}gate.tid2eid", table, "ids", "routers", "text")
    else:
        yield _plain(f"{at}gate.bias", (router.experts,), "routers")
    for expert in range(router.experts):
        stem = f"{at}experts.{expert}."
        yield from _mlp(stem, d, f, "routed experts")
    yield from _mlp(f"{at}shared_experts.", d, f * args.n_shared_experts, "shared experts")


def _mlp(at: str, d: int, width: int, group: str) -> Iterator[Entry]:
    for part in ("w1", "w2", "w3"):
        yield _linear(f"{at}{part}", (d, width) if part == "w2" else (width, d), group)
