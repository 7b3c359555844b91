"""Sizes, parameter table and n-gram hash of the model that is trained here.

Owns: `demo_args` (the bundled demo model), `parameter_table` (every trainable tensor with its
shape, storage format and optimiser group, under the published names) and `engram_tables`.
Knows nothing of: torch, files, the training loop. Needs numpy and `deepdraft.arch` only.
"""

from dataclasses import dataclass

import numpy as np

from deepdraft.arch import V41Args

DEMO_CONTEXT = 4096


def demo_args(
    *,
    vocab_size: int = 4096,
    compressed_vocab: int,
    noise_token_id: int,
    image_token_id: int | None,
    pad_token_id: int = 2,
) -> V41Args:
    """The demo model (design note demo-model 3.1); the token ids come from its tokenizer."""
    args = V41Args(
        vocab_size=vocab_size,
        hidden_size=192,
        moe_intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=96,
        o_lora_rank=64,
        o_groups=2,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        max_position_embeddings=DEMO_CONTEXT,
        rope_theta=10000.0,
        rope_factor=4.0,
        rope_beta_fast=32.0,
        rope_beta_slow=1.0,
        rope_original_max_positions=1024,
        compress_rope_theta=160000.0,
        n_routed_experts=16,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        sliding_window=64,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=128,
        candidate_source_layer_id=4,
        candidate_topk_blocks=32,
        candidate_block_size=8,
        hc_mult=4,
        hc_sinkhorn_iters=4,
        hc_eps=1e-6,
        engram_layer_ids=(1, 2),
        engram_num_embeddings=(0, 0),
        engram_max_ngram_size=4,
        engram_vocab_size=4093,
        engram_n_heads=4,
        engram_head_dim=32,
        engram_pad_token_id=pad_token_id,
        engram_compressed_vocab_size=compressed_vocab,
        num_nextn_predict_layers=2,
        dspark_block_size=5,
        dspark_noise_token_id=noise_token_id,
        dspark_target_layer_ids=(5, 6, 7),
        dspark_markov_rank=64,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=pad_token_id,
        image_token_id=image_token_id,
    )
    return with_engram_rows(args)


def with_engram_rows(args: V41Args) -> V41Args:
    """The same sizes with `engram_num_embeddings` computed from the primes."""
    values = {name: getattr(args, name) for name in V41Args.__dataclass_fields__}
    values["engram_num_embeddings"] = tuple(int(p.sum()) for p in engram_tables(args).primes)
    return V41Args(**values)


@dataclass(frozen=True)
class EngramTables:
    """Per Engram layer: primes and row offsets [orders * heads], multipliers [max n-gram]."""

    primes: tuple[np.ndarray, ...]
    offsets: tuple[np.ndarray, ...]
    multipliers: tuple[np.ndarray, ...]


def _is_prime(n: int) -> bool:
    if n < 2:
        return False
    divisor = 2
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 1
    return True


def engram_tables(args: V41Args) -> EngramTables:
    """The hash of architecture section 5.2: primes are never reused, in (order, head) order."""
    used: set[int] = set()
    primes, offsets, multipliers = [], [], []
    bound = ((2**63 - 1) // args.engram_compressed_vocab_size) // 2
    for layer in args.engram_layer_ids:
        row: list[int] = []
        for _order in range(2, args.engram_max_ngram_size + 1):
            candidate = args.engram_vocab_size
            for _head in range(args.engram_n_heads):
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                row.append(candidate)
        values = np.array(row, dtype=np.int64)
        primes.append(values)
        offsets.append(np.concatenate([[0], np.cumsum(values)[:-1]]).astype(np.int64))
        draws = np.random.default_rng(10007 * layer).integers(
            0, bound, size=args.engram_max_ngram_size, dtype=np.int64
        )
        multipliers.append(draws * 2 + 1)
    return EngramTables(tuple(primes), tuple(offsets), tuple(multipliers))


@dataclass(frozen=True)
class Param:
    """One trainable tensor.

    `fmt` is the storage format in the published layout (bf16, f32, fp8, fp4); `optimiser` one of
    muon (matrices; `blocks` of rows are orthogonalised on their own), adam, embed, none (updated
    by rule); `init` a standard deviation, or a named start value.
    """

    name: str
    shape: tuple[int, ...]
    fmt: str
    optimiser: str
    init: float | str
    blocks: int = 1

    @property
    def published(self) -> tuple[str, ...]:
        """Names in a published checkpoint: one, or one per expert for a stacked tensor."""
        head, sep, part = self.name.rpartition(".ffn.experts.")
        if not sep:
            return (self.name,)
        return tuple(f"{head}.ffn.experts.{e}.{part}.weight" for e in range(self.shape[0]))


def _block_params(args: V41Args, p: str, experts: int, sub: int) -> list[Param]:
    d, h, hd = args.hidden_size, args.num_attention_heads, args.head_dim
    ql, ol, g, i = args.q_lora_rank, args.o_lora_rank, args.o_groups, args.moe_intermediate_size
    n = args.hc_mult
    mix = 2 * n + n * n
    out = [
        Param(f"{p}.attn_norm.weight", (d,), "bf16", "adam", "one"),
        Param(f"{p}.ffn_norm.weight", (d,), "bf16", "adam", "one"),
        Param(f"{p}.attn.wq_a.weight", (ql, d), "fp8", "muon", d**-0.5),
        Param(f"{p}.attn.q_norm.weight", (ql,), "bf16", "adam", "one"),
        Param(f"{p}.attn.wq_b.weight", (h * hd, ql), "fp8", "muon", ql**-0.5, h),
        Param(f"{p}.attn.wkv.weight", (hd, d), "fp8", "muon", d**-0.5),
        Param(f"{p}.attn.kv_norm.weight", (hd,), "bf16", "adam", "one"),
        Param(f"{p}.attn.attn_sink", (h,), "f32", "adam", "zero"),
        Param(
            f"{p}.attn.wo_a.weight", (g * ol, h * hd // g), "fp8", "muon", (h * hd / g) ** -0.5, g
        ),
        Param(f"{p}.attn.wo_b.weight", (d, g * ol), "fp8", "muon", 0.5 * (g * ol) ** -0.5),
        Param(f"{p}.ffn.gate.weight", (experts, d), "bf16", "adam", 0.5 * d**-0.5),
        Param(f"{p}.ffn.gate.bias", (experts,), "f32", "none", "zero"),
        Param(f"{p}.ffn.gate.bias_vl", (experts,), "f32", "none", "zero"),
        Param(f"{p}.ffn.experts.w1", (experts, i, d), "fp4", "muon", d**-0.5),
        Param(f"{p}.ffn.experts.w3", (experts, i, d), "fp4", "muon", d**-0.5),
        Param(f"{p}.ffn.experts.w2", (experts, d, i), "fp4", "muon", 0.5 * i**-0.5),
        Param(f"{p}.ffn.shared_experts.w1.weight", (i, d), "fp8", "muon", d**-0.5),
        Param(f"{p}.ffn.shared_experts.w3.weight", (i, d), "fp8", "muon", d**-0.5),
        Param(f"{p}.ffn.shared_experts.w2.weight", (d, i), "fp8", "muon", 0.5 * i**-0.5),
    ]
    for k, kind in enumerate(("attn", "ffn")):
        out += [
            Param(f"{p}.hc_{kind}_fn", (mix, n * d), "f32", "adam", 0.02),
            Param(f"{p}.hc_{kind}_base", (mix,), "f32", "adam", f"hc_base:{2 * sub + k}"),
            Param(f"{p}.hc_{kind}_scale", (3,), "f32", "adam", "hc_scale"),
        ]
    return out


def _sparse_params(args: V41Args, layer: int) -> list[Param]:
    role, p = args.roles[layer], f"layers.{layer}.attn"
    d, hd, ql = args.hidden_size, args.head_dim, args.q_lora_rank
    ih, idim = args.index_n_heads, args.index_head_dim
    out = []
    if role.owns_kv:
        out.append(Param(f"{p}.compressor.wkv.weight", (hd, d), "bf16", "muon", d**-0.5))
        if role.ratio == 2:
            out.append(
                Param(f"{p}.compressor.wgate.weight", (hd, d), "bf16", "muon", 0.1 * d**-0.5)
            )
        out.append(Param(f"{p}.compressor.norm.weight", (hd,), "bf16", "adam", "one"))
        out.append(Param(f"{p}.indexer.wk.weight", (idim, hd), "bf16", "muon", hd**-0.5))
        out.append(Param(f"{p}.indexer.k_norm.weight", (idim,), "bf16", "adam", "one"))
    if role.runs_indexer:
        out.append(Param(f"{p}.indexer.wq_b.weight", (ih * idim, ql), "fp8", "muon", ql**-0.5, ih))
        out.append(Param(f"{p}.indexer.weights_proj.weight", (ih, d), "bf16", "adam", d**-0.5))
    return out


def _drafter_params(args: V41Args) -> list[Param]:
    d, r, v = args.hidden_size, args.dspark_markov_rank, args.vocab_size
    out = []
    depth = args.num_nextn_predict_layers
    for m in range(depth):
        out += _block_params(args, f"mtp.{m}", args.dspark_n_routed_experts, m)
    taps, last = len(args.dspark_target_layer_ids), f"mtp.{depth - 1}"
    out += [
        Param("mtp.0.main_proj.weight", (d, taps * d), "fp8", "muon", (taps * d) ** -0.5),
        Param("mtp.0.main_norm.weight", (d,), "bf16", "adam", "one"),
        Param(f"{last}.norm.weight", (d,), "bf16", "adam", "one"),
        Param(f"{last}.markov_head.embed.weight", (v, r), "bf16", "embed", 0.3),
        Param(f"{last}.markov_head.head.weight", (v, r), "bf16", "embed", 0.02),
        Param(f"{last}.confidence_head.proj.weight", (1, d + r), "bf16", "adam", "zero"),
    ]
    return out


def parameter_table(args: V41Args) -> list[Param]:
    """Every tensor of the text model and the drafter, under the published names."""
    d, v, n = args.hidden_size, args.vocab_size, args.hc_mult
    slots = (args.engram_max_ngram_size - 1) * args.engram_n_heads
    out = [
        Param("embed.weight", (v, d), "bf16", "embed", 0.5),
        Param("head.weight", (v, d), "bf16", "embed", 0.02),
        Param("norm.weight", (d,), "bf16", "adam", "one"),
    ]
    for layer in range(args.num_hidden_layers):
        out += _block_params(args, f"layers.{layer}", args.n_routed_experts, layer)
        out += _sparse_params(args, layer)
    for k, layer in enumerate(args.engram_layer_ids):
        p, rows, w = f"layers.{layer}.engram", args.engram_num_embeddings[k], args.engram_head_dim
        out += [
            Param(f"{p}.embed.weight", (rows, w), "fp8row", "embed", 0.1),
            Param(
                f"{p}.wkv.weight",
                ((n + 1) * d, slots * w),
                "fp8",
                "muon",
                (slots * w) ** -0.5,
                n + 1,
            ),
            Param(f"{p}.q_weight", (n, d), "bf16", "adam", "one"),
            Param(f"{p}.k_weight", (n, d), "bf16", "adam", "one"),
        ]
    return out + _drafter_params(args)
