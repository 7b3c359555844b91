"""What a DeepSeek-V4.1 model is made of, as data: its sizes and the role of each layer.

Owns: `V41Args`, the checked form of a published `config.json`, and the layer table derived from it.
Knows nothing of: files, tensors, torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRole:
    """What one backbone layer does (report section 2.3; architecture notes 0.3).

    `kv_source` and `index_source` are layer ids, -1 where the layer has window attention only.
    """

    ratio: int
    """Tokens per compressed entry: 0 (window only), 1 or 2."""
    kv_source: int
    """Layer whose main KV and index keys are read."""
    index_source: int
    """Layer whose selected set is read."""
    owns_kv: bool
    """Has a compressor and the index-key projection."""
    runs_indexer: bool
    publishes_candidates: bool
    """Chooses the candidate blocks that later indexers are restricted to."""
    restricted: bool
    """Its indexer sees candidate blocks only."""
    engram: bool
    tap: bool
    """The drafter reads the mean of the streams entering this layer."""
    decoder: bool
    """Reads the decoder's global KV; in `encoder` prefill it runs on the last window only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V41Args:
    """Sizes and constants of a DeepSeek-V4.1 text model, under the published names."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_max_positions: int
    compress_rope_theta: float
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    gate_temp: float = 1.0
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """One per backbone layer, then one per drafter layer (all 0)."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    vision: tuple[tuple[str, int], ...] = ()
    """Sizes of the vision tower (published names), empty where there is none."""

    @property
    def family(self) -> str:
        """`model_type` of config.json."""
        return "deepseek_v41"

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the last KV source (its input is the encoder's output)."""
        return self.kv_source_layer_ids[-1]

    @property
    def roles(self) -> tuple[LayerRole, ...]:
        """The role of each backbone layer."""
        roles = []
        for layer in range(self.num_hidden_layers):
            ratio = self.compress_ratios[layer]
            kv_source = max((s for s in self.kv_source_layer_ids if s <= layer), default=-1)
            index_source = max((s for s in self.index_source_layer_ids if s <= layer), default=-1)
            runs_indexer = layer in self.index_source_layer_ids
            roles.append(
                LayerRole(
                    ratio=ratio,
                    kv_source=kv_source if ratio else -1,
                    index_source=index_source if ratio else -1,
                    owns_kv=layer in self.kv_source_layer_ids,
                    runs_indexer=runs_indexer,
                    publishes_candidates=layer == self.candidate_source_layer_id,
                    restricted=runs_indexer and layer > self.candidate_source_layer_id,
                    engram=layer in self.engram_layer_ids,
                    tap=layer in self.dspark_target_layer_ids,
                    decoder=layer >= self.decoder_start,
                )
            )
        return tuple(roles)
