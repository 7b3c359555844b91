"""The entry point of our vLLM plugin; `deepdraft_vllm/__init__.py` in the package that is written.

Runs once in every process of vLLM, so it imports nothing but the registry and may run again.
"""

ARCHITECTURES = ("DeepdraftV2ForCausalLM", "DeepdraftV3ForCausalLM")


def register() -> None:
    """Tells vLLM our architectures; their module is imported when a checkpoint asks for one."""
    from vllm import ModelRegistry  # pyrefly: ignore[missing-import]

    for name in ARCHITECTURES:
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, f"deepdraft_vllm.models:{name}")
