"""Models: one file per family, chosen by the type of the checked sizes."""

from typing import Any

from deepdraft.arch import LlamaArgs, ModelArgs, V41Args


def model_class(args: ModelArgs) -> Any:
    """The class of a family's model: `cls(args, source, token_map, numerics=, dtype=, device=,
    drafter=)`, with the interface of `DeepseekV41`."""
    # Imported here: a family's file pulls in torch and its operations.
    if isinstance(args, V41Args):
        from deepdraft.models.deepseek_v41 import DeepseekV41

        return DeepseekV41
    assert isinstance(args, LlamaArgs), type(args)
    from deepdraft.models.llama import Llama

    return Llama
