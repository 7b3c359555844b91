"""How the tensors of a checkpoint are laid out, as far as other engines care.

Owns: recognising expert stacks (what `state_dict()` of transformers 5 holds: all experts of a layer
in one tensor), strict accounting of either layout, before an engine takes a minute to fail.
Knows nothing of: engines.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from deepdraft.adapters.stacks import Splitter
from deepdraft.checkpoint.families import model_table, unread_tensors
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.shards import Found, check_headers, read_headers
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_maps import expert_stacks
from deepdraft.errors import CheckpointError, ConfigError

Layout = Literal["published", "stacked"]


def stacks() -> list[dict[str, Any]]:
    """The stacks of the weight map, as `Splitter` takes them."""
    return [
        {"target": rule.target, "sources": list(rule.sources), "over": rule.over}
        for rule in expert_stacks().rules
        if rule.join == "stack"
    ]


def read(
    path: Path, *, accept_unknown: Iterable[str] = ()
) -> tuple[dict[str, Any], ModelSpec, Layout]:
    """config.json as it is written, what it means, and the layout of the tensors.

    Reads headers only. Raises ConfigError and CheckpointError for a checkpoint that is not whole.
    """
    try:
        config = read_config(path / "config.json")
    except ConfigError as error:
        raise ConfigError(f"{path} has no readable config.json: {error}") from error
    spec = ModelSpec.of(config, accept_unknown=accept_unknown)
    found, layout = published(read_headers(path))
    table = model_table(spec.args, found.stored)
    check_headers(found, table, frozenset(unread_tensors(spec.args, found.stored)))
    return config, spec, layout


def published(found: Found) -> tuple[Found, Layout]:
    """The headers as those of published tensors: parts of a stack lie one after the other."""
    splitter = Splitter(stacks())
    stored, layout = {}, "published"
    for name, place in found.stored.items():
        try:
            parts = splitter.parts(name, place.shape)
        except ValueError as error:
            raise CheckpointError(f"{place.shard}: {error}") from error
        if parts is None:
            stored[name] = place
            continue
        layout, at = "stacked", place.start
        size = (place.end - place.start) // max(1, prod(place.shape))
        for own, form in parts:
            end = at + prod(form) * size
            stored[own] = replace(place, name=own, shape=form, start=at, end=end)
            at = end
    if layout == "published":
        return found, "published"
    # The index, if there is one, names stacks.
    return Found(found.directory, stored, found.twice, None), "stacked"
