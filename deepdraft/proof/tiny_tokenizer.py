"""A byte-level BPE tokenizer of a few hundred tokens, so that tiny checkpoints are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

_CONTROL = {
    0: "<｜begin▁of▁sentence｜>",
    1: "<｜end▁of▁sentence｜>",
    2: "<｜▁pad▁｜>",
}
_NUM_BYTES = 256


def tiny_tokenizer(size: int) -> dict[str, Any]:
    """A byte-level BPE of `size` ids as a tokenizer.json: control tokens, bytes, frequent pairs."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [chr(_NUM_BYTES + i) for i in range(_NUM_BYTES - len(printable))]
    tokens = [*_CONTROL.values(), *map(chr, printable), *moved]
    if size < len(tokens) + 1:
        raise ConfigError(f"vocab_size = {size} holds no byte-level tokenizer")
    merges: list[list[str]] = []
    for pair in _pairs():
        if len(tokens) == size - 1:
            break
        merges.append(list(pair))
        tokens.append("".join(pair))
    placeholders = [f"<｜place▁holder▁{i}｜>" for i in range(size - len(tokens))]
    control = _CONTROL | dict(enumerate(placeholders, len(tokens)))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **flags, "special": True} for i, text in control.items()
        ],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": True},
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _pairs() -> list[tuple[str, str]]:
    """Pairs of letters in an order that puts frequent ones first; the first of a pair may be the
    blank before a word."""
    letters = "etaoinshrdlu"
    return [(a, b) for a in "Ġ" + letters for b in letters] + [
        (a, b) for a in letters for b in "cmfwgypbvk"
    ]


def write_tokenizer(out: Path, size: int) -> None:
    """tokenizer.json and tokenizer_config.json."""
    text = json.dumps(tiny_tokenizer(size), ensure_ascii=False)
    (out / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": _CONTROL[0],
        "eos_token": _CONTROL[1],
        "pad_token": _CONTROL[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
