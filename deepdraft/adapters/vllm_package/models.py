"""vLLM's DeepSeek classes for checkpoints that are laid out otherwise than the published ones.

Two things differ from vLLM's own: tensors are renamed and split as `map.json` says, and keys that
transformers leaves out of a saved configuration are put back before the model is built.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepdraft_vllm.stacks import Splitter  # pyrefly: ignore[missing-import]
from vllm.model_executor.models.deepseek_v2 import (  # pyrefly: ignore[missing-import]
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
)

_MAP = json.loads(Path(__file__).with_name("map.json").read_text())


class _Mapped:
    """Before a class of vLLM in the order of resolution."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        for key, value in _MAP["needs"].get(config.model_type, {}).items():
            if getattr(config, key, None) is None:
                setattr(config, key, value)
        build: Any = super().__init__
        build(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Loads published tensors, whatever layout they come in."""
        published = Splitter(_MAP["stacks"]).published(weights)
        return super().load_weights(published)  # pyrefly: ignore[missing-attribute]


class DeepdraftV2ForCausalLM(_Mapped, DeepseekV2ForCausalLM):
    """DeepSeek-V2 and V2-Lite."""


class DeepdraftV3ForCausalLM(_Mapped, DeepseekV3ForCausalLM):
    """DeepSeek-V3, V3.1 and R1."""
