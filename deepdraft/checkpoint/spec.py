"""One canonical description of a model, whatever style its config.json is written in.

Owns: `ModelSpec` (published keys, checked sizes, effective values), the comparison of two of them
by what they compute, and which key a difference comes from. Styles are `spec_styles`, tensors
`spec_weights`. Knows nothing of: files, weights.

Two specs are equal when their *effective* values are: a key that has no effect (V2's
`norm_topk_prob`, YaRN's `beta_fast` on a short rotary part) makes no difference.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepdraft.arch import LlamaArgs, ModelArgs, Rope, Router
from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.section import ACCEPTED_KEYS
from deepdraft.checkpoint.spec_styles import Style, to_published, written
from deepdraft.errors import ConfigError

NOT_IN_LOGITS = frozenset(
    (
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "more_end_ids",
        "pad_token_id",
        "num_nextn_predict_layers",
        "drafter_compresses",
        "scale_fmt",
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
    )
)
"""Effective values that bound or end a text, belong to a drafter, or to quantised inputs only."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A value in which two specs differ."""

    field: str
    ours: Any
    theirs: Any

    @property
    def in_logits(self) -> bool:
        """Whether logits depend on it."""
        return self.field.split(".")[0] not in NOT_IN_LOGITS


@dataclass(frozen=True, slots=True)
class KeyCause:
    """A key of config.json that makes two specs differ. `value` None: the key is absent."""

    key: str
    ours: Any
    theirs: Any
    fields: tuple[str, ...]
    """Effective values that become equal when the key does."""
    alone: bool
    """No other key needs to change."""


@dataclass(frozen=True)
class ModelSpec:
    """A model: its published configuration, and what follows from it."""

    config: dict[str, Any]
    """Published style. Not to be changed; see `replaced`."""
    args: ModelArgs

    @classmethod
    def of(cls, config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> ModelSpec:
        """From a config.json of any style. Raises ConfigError."""
        args = parse_model_args(config, accept_unknown=accept_unknown)
        return cls(to_published(config), args)

    def written(self, style: Style = "published") -> dict[str, Any]:
        """The configuration in a style (`spec_styles`)."""
        return written(self.config, style)

    def replaced(self, key: str, value: Any) -> ModelSpec:
        """With one key (a dotted path) set, or taken away by None. Raises ConfigError."""
        return self.with_keys({key: value})

    def with_keys(self, changes: Mapping[str, Any]) -> ModelSpec:
        """With several keys set at once, as `replaced`. Raises ConfigError."""
        config = copy.deepcopy(self.config)
        for key, value in changes.items():
            *parents, last = key.split(".")
            place = config
            for part in parents:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    raise ConfigError(f"{key}: {part} is no object here")
            if value is None:
                place.pop(last, None)
            else:
                place[last] = copy.deepcopy(value)
        return ModelSpec(config, parse_model_args(config))

    @cached_property
    def effective(self) -> dict[str, Any]:
        """What the model computes with, by name: sizes, frequencies, factors, routing."""
        values: dict[str, Any] = {"family": self.config["model_type"]}
        for field in dataclasses.fields(self.args):
            value = getattr(self.args, field.name)
            if isinstance(value, Rope):
                values |= _rope(field.name, value, rotary_width(self.args))
            elif isinstance(value, Router):
                values |= _router(value)
            else:
                values[field.name] = value
        if hasattr(self.args, "softmax_scale"):
            values["softmax_scale"] = self.args.softmax_scale
        return values

    def differences(self, other: ModelSpec) -> list[Difference]:
        """Effective values that differ."""
        a, b = self.effective, other.effective
        return [
            Difference(name, a.get(name), b.get(name))
            for name in dict.fromkeys((*a, *b))
            if not _equal(a.get(name), b.get(name))
        ]

    def causes(self, other: ModelSpec) -> list[KeyCause]:
        """Keys that make this spec differ from `other`, the ones that suffice alone first."""
        before = {d.field for d in self.differences(other)}
        if not before:
            return []
        ours, theirs = flatten(self.config), flatten(other.config)
        found = []
        for key in dict.fromkeys((*ours, *theirs)):
            if ours.get(key) == theirs.get(key) or key.split(".")[-1] in ACCEPTED_KEYS:
                continue
            try:
                changed = self.replaced(key, theirs.get(key))
            except ConfigError:
                continue
            after = {d.field for d in changed.differences(other)}
            if fixed := before - after:
                found.append(
                    KeyCause(key, ours.get(key), theirs.get(key), tuple(sorted(fixed)), not after)
                )
        found.sort(key=lambda c: (not c.alone, -len(c.fields), _is_object(c), c.key))
        return [c for c in found if c.alone] or found


def _is_object(cause: KeyCause) -> bool:
    return isinstance(cause.ours, dict) or isinstance(cause.theirs, dict)


def rotary_width(args: Any) -> int:
    """Channels of a head that turn."""
    return args.head_dim if isinstance(args, LlamaArgs) else args.qk_rope_head_dim


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value; objects are there whole as well as by their parts."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat[f"{prefix}{key}"] = value
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
    return flat


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= 1e-12 * max(abs(a), abs(b))
    return a == b


def _rope(name: str, rope: Rope, width: int) -> dict[str, Any]:
    # Imported here: `deepdraft inspect` and the static checks start without torch.
    from deepdraft.ops.rope import frequencies

    return {
        f"{name}.frequencies": tuple(frequencies(rope, width).tolist()),
        f"{name}.cos_sin_factor": rope.attention_factor,
        f"{name}.softmax_factor": rope.softmax_factor,
    }


def _router(router: Router) -> dict[str, Any]:
    values = {f"router.{f.name}": getattr(router, f.name) for f in dataclasses.fields(router)}
    if router.kept_groups == router.groups:
        # Every group is kept: the choice is free, whatever a group is.
        values |= {"router.groups": 1, "router.kept_groups": 1, "router.group_best": 1}
    return values
