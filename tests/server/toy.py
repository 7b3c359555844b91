"""A byte-level toy tokenizer with the chat tokens, and a served fake model on top of it."""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepdraft.config import Config, EngineConfig, ServerConfig
from deepdraft.engine.load import LoadedModel
from deepdraft.server.service import Service
from deepdraft.text.conversation import Family
from deepdraft.text.tokenizer import Tokenizer
from tests.engine.fake import DraftingRunner, FakeRunner

CHAT_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜fim▁begin｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁end｜>",
)
BOS, EOS = 0, 1


def tokenizer_file(directory: Path, special: Sequence[str] = CHAT_TOKENS) -> Path:
    """Writes a tokenizer.json: the special tokens first, then the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(moved))]
    vocab = {token: i for i, token in enumerate((*special, *letters))}
    added = [
        {
            "id": i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, content in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(spec))
    return file


def reply(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of an answer in which control tokens are spelled out."""
    return tokenizer.encode_with_control(text)


class Toy:
    """A served fake model whose answer a test chooses with `say`."""

    def __init__(
        self,
        directory: Path,
        *,
        special: Sequence[str] = CHAT_TOKENS,
        engine: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        max_tokens: int = 4096,
        defaults: dict[str, float] | None = None,
        drafts: bool = False,
        family: Family = "v4.1",
    ) -> None:
        self.tokenizer = Tokenizer.load(tokenizer_file(directory, special))
        kind = DraftingRunner if drafts else FakeRunner
        self.runner: FakeRunner = kind(vocab_size=self.tokenizer.vocab_size, max_tokens=max_tokens)
        self.prompts: list[str] = []
        self.defaults = defaults or {}
        self.family: Family = family
        self.gate = threading.Event()
        """Loading waits for it."""
        self.gate.set()
        self.service = Service(
            self.load,
            Config(engine=EngineConfig(**(engine or {})), server=ServerConfig(**(server or {}))),
        )

    def load(self) -> LoadedModel:
        assert self.gate.wait(60)
        return LoadedModel(
            runner=self.runner,
            tokenizer=self.tokenizer,
            args=None,
            name="toy",
            eos_token_id=EOS,
            bos_token_id=BOS,
            fingerprint="fp_toy",
            family=self.family,
            sampling_defaults=self.defaults,
        )

    def say(self, answer: str | Callable[[str], str]) -> None:
        """Answers every prompt with this text, or with what it makes of the prompt's text."""

        @functools.lru_cache(maxsize=64)  # the runner asks anew for every token
        def made(prompt: tuple[int, ...]) -> list[int]:
            text = self.tokenizer.decode(prompt)
            return reply(self.tokenizer, answer(text) if callable(answer) else answer)

        self.runner.script = lambda prompt: made(tuple(prompt))
