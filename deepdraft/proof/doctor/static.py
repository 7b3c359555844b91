"""Static checks: config.json, names, shapes and dtypes of tensors, tokenizer. No weight is read.

Owns: the checks that take seconds whatever the size of the checkpoint.
Knows nothing of: values of weights, running a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepdraft.arch import V4Args, V41Args
from deepdraft.arch.decoder import yarn_mscale
from deepdraft.checkpoint.layouts import Layout, read_published
from deepdraft.checkpoint.section import read_config, show
from deepdraft.checkpoint.shards import Found, Nearest, check_link
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.doctor.accounting import Accounts, by_group, find_repairs
from deepdraft.proof.doctor.finding import Finding

_MAX_NAMES = 3
_MAX_GROUPS = 8
_MAX_JSON_BYTES = 1 << 20
_MAX_TOKENIZER_BYTES = 256 << 20
_FEWEST_TOKENS = 0.9
"""Published vocabularies are padded by at most a few per cent of their rows."""
_KEY = re.compile(r"^[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+|\[\d+\])*")


@dataclass(slots=True)
class Facts:
    """What the static checks learned, for the checks after them."""

    path: Path
    spec: ModelSpec | None = None
    found: Found | None = None
    layout: Layout = "published"
    accounts: Accounts | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def loadable(self) -> bool:
        """Whether the weights can be read."""
        return self.accounts is not None and not any(
            f.severity == "error" and f.check in ("config", "files", "tensors")
            for f in self.findings
        )


def static_checks(path: Path, *, accept_unknown: Iterable[str] = ()) -> Facts:
    """Runs all of them; what cannot be read is a finding, never an exception."""
    facts = Facts(path)
    facts.findings += _config(facts, accept_unknown)
    facts.findings += _files(facts)
    if facts.spec is not None and facts.found is not None:
        facts.findings += _tensors(facts)
        facts.findings += _quantisation(facts)
        facts.findings += _drafter(facts)
    if facts.spec is not None:
        facts.findings += _rotation(facts.spec)
        facts.findings += _unwritten_factor(facts.spec, read_config(path / "config.json"))
        facts.findings += _tokenizer(facts.path, facts.spec)
    return facts


# ---- config.json -------------------------------------------------------------------------------


def _config(facts: Facts, accept_unknown: Iterable[str]) -> Iterator[Finding]:
    file = facts.path / "config.json"
    if not file.is_file():
        yield _broken("config", "config.json", "there is no config.json", "download it too")
        return
    try:
        check_link(facts.path, file)
    except CheckpointError as error:
        yield _broken("config", "config.json", error.message, "put the file itself there")
        return
    try:
        config = read_config(file)
        facts.spec = ModelSpec.of(config, accept_unknown=accept_unknown)
    except ConfigError as error:
        yield _broken("config", _key_of(error), error.message, "correct the key")


def _key_of(error: ConfigError) -> str:
    """The key that a message begins with."""
    message = error.message
    if message.startswith("config.json has keys that are not known"):
        message = message.split(": ", 1)[-1]
    found = _KEY.match(message)
    return found.group() if found else "config.json"


def _broken(check: str, cause: str, what: str, fix: str) -> Finding:
    return Finding(check, cause, what, "", fix)


# ---- files -------------------------------------------------------------------------------------


def _files(facts: Facts) -> Iterator[Finding]:
    try:
        facts.found, facts.layout = read_published(facts.path)
    except CheckpointError as error:
        name = next((p.name for p in _children(facts.path) if p.name in error.message), "")
        yield _broken(
            "files",
            name or "*.safetensors",
            error.message,
            "fetch the named file again from its source",
        )
        return
    for remark in facts.found.twice:
        yield Finding(
            "files",
            remark.split(" is in ")[0],
            "a tensor is stored twice",
            remark,
            "keep the shards of one download only",
        )
    weight_map = facts.found.weight_map
    if weight_map is None:
        return
    stored = facts.found.stored
    wrong = [
        name
        for name, file in weight_map.items()
        if name in stored and stored[name].shard.name != file
    ]
    ghosts = [name for name in weight_map if name not in stored]
    hidden = [name for name in stored if name not in weight_map]
    for names, what in (
        (wrong, "the index puts tensors into other shards than hold them"),
        (ghosts, "the index names tensors that no shard holds"),
        (hidden, "shards hold tensors that the index does not name"),
    ):
        if names:
            yield Finding(
                "files",
                "model.safetensors.index.json",
                f"{what}: {_some(names)}",
                f"{len(names)} of {len(stored)} tensors",
                "use index and shards of one download",
            )


def _children(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir(), key=lambda p: -len(p.name))
    except OSError:
        return []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


# ---- tensors -----------------------------------------------------------------------------------


def _tensors(facts: Facts) -> Iterator[Finding]:
    assert facts.spec is not None and facts.found is not None
    stored = facts.found.stored
    repairs, _, accounts = find_repairs(facts.spec, stored)
    facts.accounts = accounts
    for repair in repairs:
        yield Finding(
            "tensors",
            repair.key,
            f"{repair.key} = {show(repair.configured)}, but the files show {show(repair.shown)}",
            f"{repair.evidence}; that value settles {repair.explains} of "
            f"{repair.explains + repair.left} mismatches of names and shapes",
            f"set {repair.key} to {show(repair.shown)} in config.json, or fetch the weights that "
            "belong to it",
        )
    table = accounts.table
    near = Nearest(accounts.left_over) if accounts.missing and accounts.left_over else None
    for group, names in _first(by_group(accounts.missing)):
        shape = list(table[names[0]].shape)
        hint = near.hint(names[0], "left over") if near else ""
        yield Finding(
            "tensors",
            group,
            f"{len(names)} tensors are missing: {_some(names)}",
            f"config.json makes {names[0]} {shape}{hint}",
            "fetch the files again, or convert the checkpoint without dropping them",
        )
    for group, names in _first(by_group(accounts.left_over)):
        yield Finding(
            "tensors",
            group,
            f"{len(names)} tensors have no place in this configuration: {_some(names)}",
            f"{names[0]} is {list(stored[names[0]].shape)} in {stored[names[0]].shard.name}",
            "correct config.json, or remove them",
        )
    for group, names in _first(by_group(accounts.shapes)):
        yield Finding(
            "tensors",
            group,
            f"{len(names)} tensors have another shape than config.json makes: {_some(names)}",
            f"{names[0]} is {list(stored[names[0]].shape)}, config.json makes it "
            f"{list(table[names[0]].shape)}",
            "correct the sizes in config.json, or convert the tensors again",
        )
    for group, names in _first(by_group(accounts.dtypes)):
        yield Finding(
            "tensors",
            group,
            f"{len(names)} tensors are stored as {stored[names[0]].dtype}: {_some(names)}",
            f"{names[0]}: this kind of tensor is not stored so",
            "convert them again; scales are E8M0 bytes or F32 factors, never other integers",
        )


def _first(groups: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """The largest groups, bounded."""
    return sorted(groups.items(), key=lambda g: -len(g[1]))[:_MAX_GROUPS]


def _quantisation(facts: Facts) -> Iterator[Finding]:
    assert facts.spec is not None and facts.found is not None
    quantised = [n for n, s in facts.found.stored.items() if s.dtype == "F8_E4M3"]
    declared = facts.spec.config.get("quantization_config")
    if isinstance(facts.spec.args, V41Args):
        return
    if quantised and not declared:
        yield Finding(
            "config",
            "quantization_config",
            "config.json does not say that weights are FP8: other engines read them unscaled",
            f"{len(quantised)} tensors are F8_E4M3: {_some(quantised)}",
            "add the quantization_config of the published checkpoint",
            "warning",
        )
    if declared and not quantised and any(s.dtype == "BF16" for s in facts.found.stored.values()):
        yield Finding(
            "config",
            "quantization_config",
            "config.json announces FP8 weights, but none is FP8",
            "all matrices are stored in wider types",
            "remove quantization_config after dequantising",
            "warning",
        )
    if not quantised:
        yield from _mixed(facts)


def _mixed(facts: Facts) -> Iterator[Finding]:
    """A few narrow matrices among wide ones: a cast that only some tensors went through."""
    assert facts.accounts is not None and facts.found is not None
    widths: dict[str, list[str]] = {}
    for name, entry in facts.accounts.table.items():
        place = facts.found.stored.get(name)
        if place is not None and len(place.shape) == 2 and entry.module == "text":
            widths.setdefault(place.dtype, []).append(name)
    narrow = widths.get("BF16", []) + widths.get("F16", [])
    if 0 < len(narrow) < len(widths.get("F32", [])) / 4:
        for group, names in _first(by_group(narrow)):
            yield Finding(
                "tensors",
                group,
                f"stored as {facts.found.stored[names[0]].dtype} while other matrices are F32",
                f"{len(names)} of {len(narrow) + len(widths['F32'])} matrices",
                "store them in float32 like the rest, if the source has that",
                "warning",
            )


def _drafter(facts: Facts) -> Iterator[Finding]:
    """Tensors of a drafter that config.json announces and no file holds."""
    assert facts.spec is not None and facts.found is not None
    args: Any = facts.spec.args
    layers = getattr(args, "num_nextn_predict_layers", 0)
    if isinstance(args, V41Args) or not layers:
        return
    short = isinstance(args, V4Args)
    for number in range(layers):
        prefix = f"mtp.{number}." if short else f"model.layers.{args.num_hidden_layers + number}."
        if not any(name.startswith(prefix) for name in facts.found.stored):
            yield Finding(
                "tensors",
                f"{prefix}*",
                f"num_nextn_predict_layers = {layers} announces a drafter whose tensors are "
                "missing",
                f"no tensor begins with {prefix}",
                "fetch the complete checkpoint, or set num_nextn_predict_layers to 0 if it was "
                "exported without them: answers stay right, drafting is lost",
                "warning",
            )


# ---- rotation, tokenizer -----------------------------------------------------------------------


def _rotation(spec: ModelSpec) -> Iterator[Finding]:
    """A stretched context must be the context."""
    args: Any = spec.args
    for name in ("rope", "compress_rope"):
        rope = getattr(args, name, None)
        if rope is None or rope.kind != "yarn":
            continue
        reach = rope.factor * rope.original_max_positions
        if reach != args.max_position_embeddings:
            yield Finding(
                "config",
                "rope_scaling",
                "YaRN does not stretch the original context to max_position_embeddings",
                f"factor {rope.factor:g} x original_max_position_embeddings "
                f"{rope.original_max_positions} = {reach:g}, max_position_embeddings = "
                f"{args.max_position_embeddings}",
                "compare rope_scaling with the published config.json",
                "warning",
            )
        return


def _unwritten_factor(spec: ModelSpec, original: dict[str, Any]) -> Iterator[Finding]:
    """A V4 in transformers' style must say the factor that transformers would derive otherwise."""
    parts = original.get("rope_parameters")
    if not isinstance(spec.args, V4Args) or not isinstance(parts, dict):
        return
    rope = spec.args.compress_rope
    if rope.kind == "yarn" and parts["compress"].get("attention_factor") is None:
        yield Finding(
            "config",
            "rope_parameters.compress.attention_factor",
            "transformers derives a factor for cos and sin where none is written; the published "
            "model has none, and the native engine takes 1",
            f"0.1 ln({rope.factor:g}) + 1 = {yarn_mscale(rope.factor):.4g} there, 1 here",
            "write attention_factor: 1.0 beside rope_type",
            "warning",
        )


def _tokenizer(path: Path, spec: ModelSpec) -> Iterator[Finding]:
    """Ids of the tokenizer against the rows of the embedding, from the file's JSON alone."""
    args: Any = spec.args
    ids = _token_ids(path)
    if isinstance(ids, str):
        fix = "fetch the tokenizer.json that was published with the weights"
        yield Finding("tokenizer", "tokenizer.json", ids, "", fix)
        return
    size = max(ids.values(), default=-1) + 1
    vocab = args.vocab_size
    if not _FEWEST_TOKENS * vocab <= size <= vocab:
        too = "more" if size > vocab else "far fewer"
        yield Finding(
            "tokenizer",
            "vocab_size",
            f"the tokenizer has {too} tokens than the embedding has rows",
            f"tokenizer.json has ids up to {size - 1}, vocab_size = {vocab}",
            "use the tokenizer and the weights of one model",
        )
    ends = [args.eos_token_id, *getattr(args, "more_end_ids", ())]
    names = _json(path / "tokenizer_config.json") or {}
    for role in ("bos", "eos"):
        token = names.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            continue
        ours, theirs = ends if role == "eos" else [args.bos_token_id], ids.get(text)
        if theirs not in ours:
            said = show(ours if ours[1:] else ours[0])
            yield Finding(
                "tokenizer",
                f"{role}_token_id",
                f"config.json and the tokenizer mean different tokens by {role}",
                f"{role}_token_id = {said}; tokenizer_config.json says {text!r}, which has id "
                f"{theirs}",
                f"set {role}_token_id to {theirs}, or use the tokenizer of this model",
            )
    yield from _generation(path / "generation_config.json", ends, vocab)


def _generation(file: Path, ends: list[int], vocab: int) -> Iterator[Finding]:
    """The optional file that may name more end tokens: `serve` reads it."""
    values = _json(file)
    if values is None:
        what = "it is no JSON object, or too large"
        yield Finding("tokenizer", file.name, what, "", "fetch it again, or remove it")
        return
    told = values.get("eos_token_id")
    if told is None:
        return
    theirs = told if isinstance(told, list) else [told]
    if wrong := [e for e in theirs if type(e) is not int or not 0 <= e < vocab]:
        yield Finding(
            "tokenizer",
            file.name,
            "its eos_token_id holds what is no token of this model",
            f"{show(wrong[0])}; token ids run from 0 to {vocab - 1}",
            "correct it, or remove the key: config.json has the end tokens",
        )
    elif not set(theirs) & set(ends):
        yield Finding(
            "tokenizer",
            file.name,
            "generation stops at another token than the model's end token",
            f"eos_token_id = {show(ends if ends[1:] else ends[0])} in config.json, {show(told)} "
            "there",
            "make both the same",
            "warning",
        )


def _token_ids(directory: Path) -> dict[str, int] | str:
    """Token -> id, or what is wrong with tokenizer.json."""
    file = directory / "tokenizer.json"
    try:
        check_link(directory, file)
        if file.exists() and not file.is_file():
            return f"{file} is not a plain file"
        if file.stat().st_size > _MAX_TOKENIZER_BYTES:
            return f"{file} is larger than {_MAX_TOKENIZER_BYTES} bytes; is it another file?"
        spec = json.loads(file.read_bytes())
        ids = dict(spec["model"]["vocab"])
        ids |= {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
    except CheckpointError as error:
        return error.message
    except FileNotFoundError:
        return f"{file} is missing; text can be neither read nor written without it"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"{file} is not JSON ({error}); it is truncated or damaged"
    except (KeyError, TypeError):
        return f"{file} has no vocabulary (model.vocab); it is not a tokenizer.json"
    if not all(isinstance(i, int) and 0 <= i for i in ids.values()):
        return f"{file}: token ids must be whole numbers from 0 on"
    return ids


def _json(file: Path) -> dict[str, Any] | None:
    """A small JSON object, {} where it is absent: such files are optional. None: unreadable."""
    try:
        if not file.is_file():
            return {}
        if file.stat().st_size > _MAX_JSON_BYTES:
            return None
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
