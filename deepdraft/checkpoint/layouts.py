"""How the tensors of a checkpoint are laid out: as published, or with experts in stacks.

Owns: recognising stacks (what `state_dict()` of transformers 5 holds: all experts of a layer in one
tensor), telling their parts as published tensors, strict accounting of either layout.
Knows nothing of: engines, values. A stack's parts lie one after the other, so that whoever reads
bytes needs to know nothing of stacks.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from deepdraft.checkpoint.families import model_table, unread_tensors
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.shards import Found, Stored, check_headers, read_headers
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_maps import expert_stacks
from deepdraft.checkpoint.stacks import MAX_PARTS, Splitter
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
    found, layout = read_published(path)
    table = model_table(spec.args, found.stored)
    check_headers(found, table, frozenset(unread_tensors(spec.args, found.stored)))
    return config, spec, layout


def read_published(path: Path) -> tuple[Found, Layout]:
    """`read_headers`, with parts in place of stacks. Raises CheckpointError."""
    return published(read_headers(path))


def published(found: Found) -> tuple[Found, Layout]:
    """The headers as those of published tensors. Raises CheckpointError for a stack of another
    form."""
    splitter = Splitter(stacks())
    stored: dict[str, Stored] = {}
    split: dict[str, list[str]] = {}
    twice = list(found.twice)
    count = 0
    for name, place in found.stored.items():
        try:
            parts = splitter.parts(name, place.shape)
        except ValueError as error:
            raise CheckpointError(f"{place.shard}: {error}") from error
        if parts is None:
            stored[name] = place
            continue
        count += len(parts)
        if count > MAX_PARTS:
            raise CheckpointError(
                f"{found.directory}: its stacks hold more than {MAX_PARTS} tensors; the header of "
                f"{place.shard.name} is damaged, fetch it again"
            )
        split[name] = [own for own, _ in parts]
        if both := [own for own in split[name] if own in found.stored]:
            more = f" ({len(both) - 1} more likewise)" if both[1:] else ""
            file = found.stored[both[0]].shard.name
            twice.append(f"{both[0]} is in {file} and, within {name}, in {place.shard.name}{more}")
        size, at = (place.end - place.start) // max(1, prod(place.shape)), place.start
        for own, form in parts:
            end = at + prod(form) * size
            stored[own] = replace(place, name=own, shape=form, start=at, end=end)
            at = end
    if not split:
        return found, "published"
    index = found.weight_map
    if index is not None:
        index = {own: file for name, file in index.items() for own in split.get(name, [name])}
    return Found(found.directory, stored, twice, index), "stacked"
