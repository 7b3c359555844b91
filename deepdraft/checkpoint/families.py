"""Which family a checkpoint belongs to, and what follows: its sizes and its table of tensors.

Owns: the table from `model_type` to a family's reader of config.json and maker of entries.
Knows nothing of: any family's keys or names, tensors, torch.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, ModelArgs, V4Args, V41Args
from deepdraft.checkpoint.config import parse_args, read_config
from deepdraft.checkpoint.config_llama import parse_llama
from deepdraft.checkpoint.config_mla import parse_v2, parse_v3, parse_v32
from deepdraft.checkpoint.config_v4 import parse_v4
from deepdraft.checkpoint.names import Entry, tensor_table
from deepdraft.checkpoint.names_decoder import llama_entries, mla_entries
from deepdraft.checkpoint.names_v4 import v4_entries, v4_unread
from deepdraft.checkpoint.resolve import resolve
from deepdraft.checkpoint.section import show
from deepdraft.checkpoint.shards import Stored
from deepdraft.errors import ConfigError

_PARSERS: dict[str, Callable[..., ModelArgs]] = {
    "deepseek_v41": parse_args,
    "deepseek_v4": parse_v4,
    "deepseek_v32": parse_v32,
    "deepseek_v3": parse_v3,
    "deepseek_v2": parse_v2,
    "llama": parse_llama,
}


def parse_model_args(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> ModelArgs:
    """The checked sizes of a config.json of any family. Raises ConfigError."""
    kind = config.get("model_type")
    if kind is None:
        raise ConfigError("model_type is missing; it says which family the model belongs to")
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        raise ConfigError(
            f"model_type = {show(kind)} is not supported; supported: {', '.join(_PARSERS)}"
        )
    return parser(config, accept_unknown=accept_unknown)


def load_model_args(path: Path, *, accept_unknown: Iterable[str] = ()) -> ModelArgs:
    """`parse_model_args` of a file."""
    return parse_model_args(read_config(path), accept_unknown=accept_unknown)


def model_table(args: ModelArgs, stored: Mapping[str, Stored]) -> dict[str, Entry]:
    """Name -> entry for every tensor that a checkpoint of this model holds.

    `stored`: the headers, which settle the formats that the configuration leaves open.
    """
    if isinstance(args, V41Args):
        return tensor_table(args)
    if isinstance(args, LlamaArgs):
        return resolve(llama_entries(args), stored)
    if isinstance(args, V4Args):
        return resolve(v4_entries(args), stored)
    assert isinstance(args, DeepseekV2Args | DeepseekV3Args)
    return resolve(mla_entries(args), stored)


def unread_tensors(args: ModelArgs, stored: Mapping[str, Stored]) -> list[str]:
    """Stored tensors that are accepted in any form and never read: rule `mtp`."""
    return v4_unread(args, stored) if isinstance(args, V4Args) else []
