"""A loaded model and the state of the sequences it serves.

Owns: the model, its state pool, the prefill mode. Only the engine's thread calls it.
Knows nothing of: requests, text, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import ConfigError
from deepdraft.models.deepseek_v41 import DeepseekV41, PrefillMode
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.text.tokenizer import Tokenizer, engram_token_map

STEP_ROWS = 64
"""Rows of one sequence that a step takes at most; a ring has this many spare rows."""


class Runner:
    """Runs prompts and steps of up to `num_sequences` sequences."""

    def __init__(
        self,
        model: DeepseekV41,
        *,
        prefill: PrefillMode = "full",
        max_context: int | None = None,
        num_sequences: int = 1,
        step_rows: int = STEP_ROWS,
    ) -> None:
        limit = model.args.max_position_embeddings
        if max_context is not None and not 2 <= max_context <= limit:
            raise ConfigError(
                f"max_context must lie in 2..{limit} (max_position_embeddings of the model), "
                f"got {max_context}"
            )
        if prefill not in ("full", "encoder"):
            raise ConfigError(f"prefill must be full or encoder, got {prefill!r}")
        self.model = model
        self.prefill_mode: PrefillMode = prefill
        self.vocab_size = model.args.vocab_size
        self.max_tokens = max_context or limit
        self.max_step_rows = step_rows
        self.device = model.device
        self.pool: StatePool = model.new_pool(num_sequences, self.max_tokens, slack=step_rows)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        *,
        numerics: str = "exact",
        prefill: PrefillMode = "full",
        max_context: int | None = None,
        num_sequences: int = 1,
        device: torch.device | str = "cpu",
        drafter: bool = False,
    ) -> Runner:
        """Load the model of a checkpoint. Errors name the tensor, key or file."""
        token_map = None
        if checkpoint.args.engram_layer_ids:
            if tokenizer is None:
                raise ConfigError("a model with Engram layers needs its tokenizer.json")
            token_map = checked_token_map(checkpoint, tokenizer)
        model = DeepseekV41(
            checkpoint.args,
            checkpoint,
            token_map,
            numerics=numerics,
            device=device,
            drafter=drafter,
        )
        return cls(model, prefill=prefill, max_context=max_context, num_sequences=num_sequences)

    def open_sequence(self) -> SequenceState:
        """A new, empty sequence; StateError when all are in use."""
        return self.pool.open()

    def close_sequence(self, sequence: SequenceState) -> None:
        """Give a sequence's memory back."""
        self.pool.close(sequence)

    def prefill(
        self, sequence: SequenceState, token_ids: Sequence[int], *, final: bool
    ) -> Tensor | None:
        """Append a chunk of the prompt; logits [V] after its last token when `final`."""
        out = self.model.prefill(sequence, token_ids, mode=self.prefill_mode, final=final)
        return out.logits[-1] if out.logits is not None else None

    def step(self, batch: Sequence[tuple[SequenceState, Sequence[int]]]) -> Tensor:
        """Append tokens to each sequence; logits [rows, V], row i after that token."""
        logits = self.model.step(batch).logits
        assert logits is not None
        return logits


def checked_token_map(checkpoint: Checkpoint, tokenizer: Tokenizer) -> list[int]:
    """The Engram token map, checked against the size that the checkpoint was trained with."""
    token_map = engram_token_map(tokenizer)
    args = checkpoint.args
    size = max(token_map) + 1
    if size != args.engram_compressed_vocab_size:
        raise ConfigError(
            f"text_config.engram_compressed_vocab_size is {args.engram_compressed_vocab_size}, but "
            f"the tokenizer in {checkpoint.tokenizer_file} gives {size} compressed ids; the "
            f"tokenizer does not belong to this checkpoint"
        )
    if len(token_map) < args.vocab_size:
        token_map = token_map + [token_map[args.engram_pad_token_id]] * (
            args.vocab_size - len(token_map)
        )
    return token_map
