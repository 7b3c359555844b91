"""Sizes of a Llama-like model: DeepSeek-LLM, DeepSeek-Coder, and distilled models."""

from dataclasses import dataclass

from deepdraft.arch.decoder import DecoderArgs, Rope, StateKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaArgs(DecoderArgs):
    """Grouped-query attention and a SwiGLU MLP in every layer."""

    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope

    @property
    def family(self) -> str:
        """The published model_type."""
        return "llama"

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """Keys and values of every token."""
        width = 2 * self.num_key_value_heads * self.head_dim
        return (StateKind("kv", "keys and values", self.num_hidden_layers, width),)
