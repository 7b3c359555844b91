"""What the engine needs of a model.

Owns: the calls, and what each may assume. `engine.runner.Runner` answers them.
Knows nothing of: requests, how a model does it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class ModelRunner(Protocol):
    """What the engine needs of a model; `engine.runner.Runner` is one.

    A sequence handle has `num_tokens`, the tokens that the model has seen. One that drafts is a
    `DraftingRunner` too, with a `block_size` above 0; one that preempts a `ParkingRunner`.
    """

    vocab_size: int
    max_tokens: int
    max_step_rows: int

    def open_sequence(self) -> Any:
        """A new, empty sequence."""
        ...

    def close_sequence(self, handle: Any, /, *, scrub: bool = False) -> None:
        """Frees a sequence; `scrub` where NaN or infinities may be left in it."""
        ...

    def prefill(self, handle: Any, token_ids: list[int], /, *, final: bool) -> Tensor | None:
        """Appends a part of a prompt; logits [V] after its last token when `final`."""
        ...

    def step(self, batch: list[tuple[Any, list[int]]], /) -> Tensor:
        """Appends tokens to each sequence; logits [rows, V], one row a token."""
        ...


class ParkingRunner(Protocol):
    """A runner whose sequences can make room for others."""

    def park(self, handle: Any, /) -> Any:
        """Closes a sequence and returns all that it is. Where it raises, nothing has changed."""
        ...

    def unpark(self, parked: Any, /) -> Any:
        """A parked sequence, opened again with the bits that it had."""
        ...


class JoiningRunner(Protocol):
    """A runner that reads parts of several prompts in one step."""

    joint_rows: int
    """Tokens of such a step at most; 0: none."""

    def joins(self, handle: Any, num_tokens: int, /) -> bool:
        """Whether a part of so many tokens may be read beside others."""
        ...

    def prefill_together(self, batch: list[tuple[Any, list[int]]], /) -> list[Tensor]:
        """Appends a part to each; logits [V] after the last token of each, with the bits that it
        has alone."""
        ...


class DraftRows(Protocol):
    """A block of proposals that is gone through in order."""

    def __len__(self) -> int:
        """The number of drafts."""
        ...

    def refine(self, i: int, previous: int, /) -> tuple[Tensor, float]:
        """Logits [V] of draft i and its raw confidence, given the token before it."""
        ...


class DraftingRunner(Protocol):
    """What drafting needs of a runner; `engine.runner.Runner` is one."""

    block_size: int

    def draft(self, batch: list[tuple[Any, int]], size: int = ..., /) -> Sequence[DraftRows]:
        """Begins a block for each (sequence, last token); may raise and changes nothing then.
        `size`: of a block other than `block_size`, given where the runner `shortens`."""
        ...

    def commit(self, handle: Any, num_tokens: int, /) -> None:
        """The first `num_tokens` tokens of a sequence stand; takes the rest of a step back."""
        ...
