"""A Llama configuration (DeepSeek-LLM, DeepSeek-Coder) as checked `LlamaArgs`."""

from collections.abc import Iterable
from typing import Any

from deepdraft.arch import LlamaArgs
from deepdraft.checkpoint.config_decoder import (
    decoder_fields,
    open_config,
    read_rope,
    require_even,
)
from deepdraft.checkpoint.section import refuse_unknown
from deepdraft.errors import ConfigError


def parse_llama(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> LlamaArgs:
    """Every key is read, without effect, or refused. Raises ConfigError."""
    top = open_config(config, "llama", "LlamaForCausalLM")
    rope, sections = read_rope(top, latent=False)
    fields = decoder_fields(top)
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    head_dim = top.integer_or("head_dim", None, low=1)
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(
                f"num_attention_heads = {heads} must divide hidden_size = {hidden} "
                "where head_dim is not set"
            )
        head_dim = hidden // heads
    require_even("head_dim", head_dim)
    kv_heads = top.integer_or("num_key_value_heads", heads, low=1)
    assert kv_heads is not None
    if heads % kv_heads:
        raise ConfigError(
            f"num_key_value_heads = {kv_heads} must divide num_attention_heads = {heads}"
        )
    args = LlamaArgs(
        **fields,
        intermediate_size=top.integer("intermediate_size", low=1),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
    )
    refuse_unknown([top, *sections], frozenset(accept_unknown))
    return args
