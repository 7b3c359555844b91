"""Models: one file per family, chosen by the type of the checked sizes."""

from importlib import import_module
from typing import Any

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, ModelArgs, V4Args, V41Args

_CLASSES: dict[type, str] = {
    V41Args: "deepseek_v41.DeepseekV41",
    V4Args: "deepseek_v4.DeepseekV4",
    DeepseekV3Args: "deepseek_v3.DeepseekV3",
    DeepseekV2Args: "deepseek_v2.DeepseekV2",
    LlamaArgs: "llama.Llama",
}
"""File and class of each family. A file is imported when asked for: it pulls in torch."""


def model_class(args: ModelArgs) -> Any:
    """The class of a family's model: `cls(args, source, token_map, numerics=, dtype=, device=,
    drafter=)`, with the interface of `DeepseekV41`."""
    module, name = _CLASSES[type(args)].split(".")
    return getattr(import_module(f"{__name__}.{module}"), name)
