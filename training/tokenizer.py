"""Train the demo model's tokenizer: byte-level BPE of 4096 entries with DeepSeek token strings.

Owns: the control-token table, the pre-tokenizer pattern (that of the published tokenizer.json)
and the training call. Knows nothing of where the text comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096

# Ids 0..2 as in the published configuration; the image placeholder and the spare entries have no
# training text. `<|System|>` is also the drafter's noise token, as in the published checkpoint.
CONTROL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜deepseek_image｜>",
    *(f"<｜place▁holder▁no▁{i}｜>" for i in range(10)),
)
_SPECIAL = frozenset(CONTROL_TOKENS[:3])  # only these are dropped by a decoder that skips specials

# The published pre-tokenizer: 1-3 digits, runs of CJK or kana, then words, punctuation, blanks.
_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


def new_tokenizer() -> Tokenizer:
    """An untrained tokenizer with the published pre-tokenizer and decoder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in _SPLITS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer whose first ids are CONTROL_TOKENS in order; `texts` hold no control tokens.

    While training, digits are split one by one, so no entry joins two digits: the published
    pre-tokenizer then still gives one token a digit, which a small model needs for sums.
    """
    tokenizer = new_tokenizer()
    final = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), final]
    )
    added = [
        AddedToken(t, special=t in _SPECIAL, normalized=t not in _SPECIAL) for t in CONTROL_TOKENS
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = final
    for i, token in enumerate(CONTROL_TOKENS):
        if tokenizer.token_to_id(token) != i:
            raise SystemExit(f"control token {token!r} did not get id {i}")
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"{tokenizer.get_vocab_size()} entries instead of {vocab_size}: more text")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json (added tokens flagged as published) and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads(tokenizer.to_str())
    for entry in data["added_tokens"]:
        entry["special"] = entry["content"] in _SPECIAL
        entry["normalized"] = not entry["special"]
    text = json.dumps(data, ensure_ascii=False, indent=None, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": CONTROL_TOKENS[0],
        "eos_token": CONTROL_TOKENS[1],
        "pad_token": CONTROL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
