"""Sizes of DeepSeek-V4 (Flash, Pro): compressed attention, residual streams, hash routing."""

from dataclasses import dataclass
from typing import Literal

from deepdraft.arch.decoder import DecoderArgs, Rope, Router, StateKind

AttentionKind = Literal["window", "csa", "hca"]


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Args(DecoderArgs):
    """A V4 text model, under the published names."""

    moe_intermediate_size: int
    n_shared_experts: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    sliding_window: int
    attention: tuple[AttentionKind, ...]
    """Per layer: window only, compressed sparse (CSA), heavily compressed (HCA)."""
    csa_ratio: int
    """Tokens per compressed entry of a CSA layer; each entry also sees the group before."""
    hca_ratio: int
    num_hash_layers: int
    """The first layers' experts are looked up by token id."""
    rope: Rope
    """Of window-only layers."""
    compress_rope: Rope
    """Of CSA and HCA layers: queries, window, entries and index alike."""
    router: Router
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_nextn_predict_layers: int = 0
    """Drafter layers. The DSpark sizes below are 0 where they predict the next token."""
    drafter_compresses: bool = False
    """Next-token prediction layers that are not window-only: nothing is known of such."""
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    """Layers whose output the drafter is told of."""
    dspark_markov_rank: int = 0

    @property
    def drafter_kind(self) -> StateKind:
        """Window keys of confirmed tokens, one ring for each drafter layer."""
        w, layers = self.sliding_window, self.num_nextn_predict_layers
        return StateKind("drafter", "window KV, drafter", layers, self.head_dim, ring=w, before=w)

    @property
    def family(self) -> str:
        """The published model_type."""
        return "deepseek_v4"

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer, 0 for window-only layers."""
        return {"window": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[self.attention[layer]]

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """Windows, entries, index keys, and the raw values of groups that are not complete."""
        c, ci, w = self.head_dim, self.index_head_dim, self.sliding_window
        r, far = self.csa_ratio, self.hca_ratio
        csa, hca = self.attention.count("csa"), self.attention.count("hca")
        kinds = (
            StateKind("window", "window KV", self.num_hidden_layers, c, ring=w, before=w - 1),
            StateKind("csa", "entries, CSA", csa, c, ratio=r),
            StateKind("index", "index keys, CSA", csa, ci, ratio=r),
            StateKind("csa_raw", "open groups, CSA", csa, 4 * c, ring=2 * r, group=r, before=r),
            StateKind(
                "index_raw", "open groups, index", csa, 4 * ci, ring=2 * r, group=r, before=r
            ),
            StateKind("hca", "entries, HCA", hca, c, ratio=far),
            StateKind("hca_raw", "open groups, HCA", hca, 2 * c, ring=far, group=far),
        )
        return tuple(kind for kind in kinds if kind.layers)
