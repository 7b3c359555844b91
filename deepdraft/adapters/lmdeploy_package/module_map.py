"""LMDeploy's DeepSeek class for checkpoints whose experts are stacked: a custom module map.

`PytorchEngineConfig(custom_module_map=THIS FILE)` puts it in place of the engine's own class.
"""

from collections.abc import Iterable
from typing import Any

from deepdraft_stacks import STACKS, Splitter  # pyrefly: ignore[missing-import]
from lmdeploy.pytorch.models.deepseek_v2 import (  # pyrefly: ignore[missing-import]
    DeepseekV2ForCausalLM,
)


class StackedDeepseek(DeepseekV2ForCausalLM):
    """DeepSeek-V2 and V3."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Loads published tensors, split from stacks."""
        super().load_weights(Splitter(STACKS).published(weights))


CUSTOM_MODULE_MAP = {
    "DeepseekV2ForCausalLM": "StackedDeepseek",
    "DeepseekV3ForCausalLM": "StackedDeepseek",
}
