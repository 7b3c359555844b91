"""Sizes of the models with multi-head latent attention (MLA): V2, V3, V3.2."""

from dataclasses import dataclass

from deepdraft.arch.decoder import DecoderArgs, Rope, Router, StateKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaArgs(DecoderArgs):
    """What V2 and V3 share, under the published names."""

    intermediate_size: int
    """Width of the dense MLP of the first layers."""
    moe_intermediate_size: int
    """Width of one expert; the shared experts are one MLP of `n_shared_experts` times that."""
    n_shared_experts: int
    first_k_dense_replace: int
    q_lora_rank: int | None
    """None: queries come from the hidden state in one map."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: Rope
    rope_interleave: bool
    """Rotary pairs are adjacent elements; otherwise element k pairs with k + half."""
    router: Router

    @property
    def softmax_scale(self) -> float:
        """Of the scores: 1 / sqrt(query width), times YaRN's factor."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.softmax_factor

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has the dense MLP instead of experts."""
        return layer < self.first_k_dense_replace

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """Latents."""
        return (self.latent_kind,)

    @property
    def latent_kind(self) -> StateKind:
        """One latent and one rotated key part of every token, for all heads."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        return StateKind("latent", "latents and rotated keys", self.num_hidden_layers, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Args(MlaArgs):
    """V2, V2-Lite, Coder-V2: softmax routing, choice within the best groups."""

    @property
    def family(self) -> str:
        """The published model_type."""
        return "deepseek_v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Args(MlaArgs):
    """V3, R1, V3.1, and V3.2 where `index_topk` is not 0."""

    num_nextn_predict_layers: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0

    @property
    def family(self) -> str:
        """The published model_type."""
        return "deepseek_v32" if self.index_topk else "deepseek_v3"

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """As V2, and index keys in V3.2."""
        if not self.index_topk:
            return (self.latent_kind,)
        layers, width = self.num_hidden_layers, self.index_head_dim
        return (self.latent_kind, StateKind("index", "index keys", layers, width))
