"""Rules that the values of a DeepSeek-V4.1 configuration must keep among themselves.

Owns: `check_args`. Knows nothing of: files, JSON, tensors.
"""

from collections.abc import Iterator

from deepdraft.arch import V41Args
from deepdraft.errors import ConfigError
from deepdraft.ops.engram_hash import engram_tables

_GROUP = 32
"""Scale group of every quantised axis."""


def check_args(args: V41Args) -> None:
    """Raises ConfigError for the first value that contradicts another one."""
    for problem in _problems(args):
        raise ConfigError(problem)


def _problems(args: V41Args) -> Iterator[str]:
    yield from _sizes(args)
    yield from _token_ids(args)
    yield from _ratios(args)
    yield from _sources(args)
    yield from _experts(args)
    yield from _engram(args)
    yield from _drafter(args)
    yield from _vision(args)


def _sizes(args: V41Args) -> Iterator[str]:
    for name in (
        "hidden_size",
        "moe_intermediate_size",
        "head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "index_head_dim",
        "engram_head_dim",
    ):
        value = getattr(args, name)
        if value % _GROUP:
            yield (
                f"text_config.{name} = {value} must be a multiple of {_GROUP}, "
                "the scale group of the quantised weights and caches"
            )
    if args.num_attention_heads % args.o_groups:
        yield (
            f"text_config.o_groups = {args.o_groups} must divide "
            f"num_attention_heads = {args.num_attention_heads}"
        )
    rotary = args.qk_rope_head_dim
    if rotary % 2 or rotary > min(args.head_dim, args.index_head_dim):
        yield (
            f"text_config.qk_rope_head_dim = {rotary} must be even and at most "
            f"head_dim = {args.head_dim} and index_head_dim = {args.index_head_dim}"
        )
    if args.rope_beta_fast <= args.rope_beta_slow:
        yield (
            f"text_config.rope_scaling.beta_fast = {args.rope_beta_fast:g} must be above "
            f"beta_slow = {args.rope_beta_slow:g}"
        )
    covered = args.rope_factor * args.rope_original_max_positions
    if args.max_position_embeddings > covered:
        yield (
            f"text_config.max_position_embeddings = {args.max_position_embeddings} must be at most "
            "rope_scaling.factor * original_max_position_embeddings = "
            f"{args.rope_factor:g} * {args.rope_original_max_positions} = {covered:g}"
        )


def _token_ids(args: V41Args) -> Iterator[str]:
    ids = {
        "bos_token_id": args.bos_token_id,
        "eos_token_id": args.eos_token_id,
        "pad_token_id": args.pad_token_id,
        "image_token_id": args.image_token_id,
        "text_config.engram_pad_token_id": args.engram_pad_token_id,
        "text_config.dspark_noise_token_id": args.dspark_noise_token_id,
    }
    for path, value in ids.items():
        if value is not None and value >= args.vocab_size:
            yield f"{path} = {value} must be below text_config.vocab_size = {args.vocab_size}"


def _ratios(args: V41Args) -> Iterator[str]:
    ratios = args.compress_ratios
    layers, drafter = args.num_hidden_layers, args.num_nextn_predict_layers
    if len(ratios) != layers + drafter:
        yield (
            f"text_config.compress_ratios has {len(ratios)} entries; it needs one for each of "
            f"num_hidden_layers = {layers} and num_nextn_predict_layers = {drafter}, "
            f"{layers + drafter} in all"
        )
        return
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            yield (
                f"text_config.compress_ratios[{layer}] = {ratio} is an unknown layer role; "
                "supported: 0 (window only), 1 and 2 (tokens per compressed entry)"
            )
        elif ratio and layer >= layers:
            yield (
                f"text_config.compress_ratios[{layer}] = {ratio} belongs to a drafter layer, "
                "which has window attention only; supported: 0"
            )


def _layer_ids(args: V41Args, name: str, *, empty: bool = False) -> Iterator[str]:
    ids = getattr(args, name)
    if not ids and not empty:
        yield f"text_config.{name} is empty; it must name at least one layer"
    for index, layer in enumerate(ids):
        if layer >= args.num_hidden_layers:
            yield (
                f"text_config.{name}[{index}] = {layer} is out of range; "
                f"num_hidden_layers is {args.num_hidden_layers}"
            )
        if index and layer <= ids[index - 1]:
            yield (
                f"text_config.{name}[{index}] = {layer} must be above the entry before it, "
                f"{ids[index - 1]}"
            )


def _sources(args: V41Args) -> Iterator[str]:
    yield from _layer_ids(args, "kv_source_layer_ids")
    yield from _layer_ids(args, "index_source_layer_ids")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for index, layer in enumerate(getattr(args, name)):
            if not args.compress_ratios[layer]:
                yield (
                    f"text_config.{name}[{index}] = {layer} is a window-only layer "
                    f"(compress_ratios[{layer}] = 0); a source needs ratio 1 or 2"
                )
    for index, layer in enumerate(args.kv_source_layer_ids):
        if layer not in args.index_source_layer_ids:
            yield (
                f"text_config.kv_source_layer_ids[{index}] = {layer} must be one of "
                f"index_source_layer_ids = {list(args.index_source_layer_ids)}: "
                "a selection made for other entries cannot be reused"
            )
    for layer, role in enumerate(args.roles):
        if role.ratio and role.kv_source < 0:
            yield (
                f"text_config.compress_ratios[{layer}] = {role.ratio} reads compressed entries, "
                f"but no layer of kv_source_layer_ids = {list(args.kv_source_layer_ids)} "
                "comes before it"
            )
        elif role.ratio and role.ratio != args.compress_ratios[role.kv_source]:
            yield (
                f"text_config.compress_ratios[{layer}] = {role.ratio} does not fit its KV source, "
                f"layer {role.kv_source} with ratio {args.compress_ratios[role.kv_source]}"
            )
    if args.compress_ratios[args.decoder_start] != 1:
        yield (
            f"text_config.compress_ratios[{args.decoder_start}] = "
            f"{args.compress_ratios[args.decoder_start]}: the last KV source opens the decoder, "
            "whose entries stand for one token each; supported: 1"
        )
    candidate = args.candidate_source_layer_id
    if candidate not in args.index_source_layer_ids or candidate < args.decoder_start:
        decoder_sources = [i for i in args.index_source_layer_ids if i >= args.decoder_start]
        yield (
            f"text_config.candidate_source_layer_id = {candidate} must be an index source that "
            f"reads the last KV source; supported here: {decoder_sources}"
        )


def _experts(args: V41Args) -> Iterator[str]:
    for chosen, total in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        if getattr(args, chosen) > getattr(args, total):
            yield (
                f"text_config.{chosen} = {getattr(args, chosen)} must be at most "
                f"{total} = {getattr(args, total)}"
            )

    count = 3 * (
        args.num_hidden_layers * args.n_routed_experts
        + args.num_nextn_predict_layers * args.dspark_n_routed_experts
    )
    if count > _MAX_EXPERT_TENSORS:
        yield (
            f"text_config.n_routed_experts = {args.n_routed_experts} with num_hidden_layers = "
            f"{args.num_hidden_layers}, and dspark_n_routed_experts = "
            f"{args.dspark_n_routed_experts} with num_nextn_predict_layers = "
            f"{args.num_nextn_predict_layers}, make {count} expert tensors; supported: at most "
            f"{_MAX_EXPERT_TENSORS}"
        )


def _engram(args: V41Args) -> Iterator[str]:
    yield from _layer_ids(args, "engram_layer_ids", empty=True)
    if args.engram_compressed_vocab_size > args.vocab_size:
        yield (
            f"text_config.engram_compressed_vocab_size = {args.engram_compressed_vocab_size} must "
            f"be at most vocab_size = {args.vocab_size}"
        )
    if len(args.engram_num_embeddings) != len(args.engram_layer_ids):
        yield (
            f"text_config.engram_num_embeddings has {len(args.engram_num_embeddings)} entries; "
            f"engram_layer_ids has {len(args.engram_layer_ids)}"
        )
        return
    hashes = len(args.engram_layer_ids) * (args.engram_max_ngram_size - 1) * args.engram_n_heads
    if hashes > _MAX_HASHES:
        yield (
            f"text_config.engram_n_heads = {args.engram_n_heads} with engram_max_ngram_size = "
            f"{args.engram_max_ngram_size} and {len(args.engram_layer_ids)} layers makes {hashes} "
            f"hashes; supported: at most {_MAX_HASHES}"
        )
        return
    expected = engram_tables(args).num_embeddings
    if args.engram_num_embeddings != expected:
        yield (
            f"text_config.engram_num_embeddings = {list(args.engram_num_embeddings)} does not fit "
            f"engram_vocab_size = {args.engram_vocab_size}, engram_n_heads = {args.engram_n_heads} "
            f"and engram_max_ngram_size = {args.engram_max_ngram_size}: the sums of their primes "
            f"are {list(expected)}"
        )


_MAX_HASHES = 4096
_MAX_EXPERT_TENSORS = 500_000
"""Several times what the largest published model has; bounds the table of tensors."""
_MAX_VISION_LAYERS = 1024


def _drafter(args: V41Args) -> Iterator[str]:
    drafting = args.num_nextn_predict_layers > 0
    yield from _layer_ids(args, "dspark_target_layer_ids", empty=not drafting)
    early = [layer for layer in args.dspark_target_layer_ids if layer < args.decoder_start]
    if early:
        # Encoder prefill runs the decoder on the last window only; taps exist there only.
        yield (
            f"text_config.dspark_target_layer_ids = {list(args.dspark_target_layer_ids)} must lie "
            f"in the decoder (layers {args.decoder_start}..{args.num_hidden_layers - 1}): {early}"
        )


def _vision(args: V41Args) -> Iterator[str]:
    sizes = dict(args.vision)
    if not sizes:
        return
    for name, value in sizes.items():
        if value < 1:
            yield f"vision_config.{name} = {value} must be at least 1"
            return
    if sizes["num_hidden_layers"] > _MAX_VISION_LAYERS:
        yield (
            f"vision_config.num_hidden_layers = {sizes['num_hidden_layers']} must be at most "
            f"{_MAX_VISION_LAYERS}"
        )
        return
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        yield (
            f"vision_config.num_attention_heads = {sizes['num_attention_heads']} must divide "
            f"hidden_size = {sizes['hidden_size']}"
        )
    if args.image_token_id is None:
        yield "image_token_id is missing, but vision_config describes a vision tower"
