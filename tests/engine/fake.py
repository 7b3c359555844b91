"""A runner without a model: scripted answers over a toy vocabulary, with faults on demand."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepdraft.errors import StateError

Script = Callable[[Sequence[int]], Sequence[int]]


class FakeSequence:
    """What the fake model remembers of a sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_prompt = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class FakeRunner:
    """Answers `script(prompt_ids)`, then token 1 for ever, whatever the tokens it is fed.

    Logits are small and depend on (position, last token); the scripted token gets `strength` more,
    so that greedy answers follow the script and sampled ones depend on the noise when `strength`
    is small. Faults: `prefill_fault` and `step_fault` are called with what is about to run and may
    raise or sleep; `spoil` may change the logits of a sequence.
    """

    def __init__(
        self,
        script: Script = lambda prompt: [],
        *,
        vocab_size: int = 300,
        max_tokens: int = 4096,
        max_step_rows: int = 16,
        strength: float = 40.0,
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.max_step_rows = max_step_rows
        self.strength = strength
        self.prefill_fault: Callable[[FakeSequence, list[int]], None] = lambda s, ids: None
        self.step_fault: Callable[[list[FakeSequence]], None] = lambda sequences: None
        self.spoil: Callable[[FakeSequence, Tensor], Tensor] = lambda s, logits: logits
        self.delay_s = 0.0
        self.open_handles: set[FakeSequence] = set()
        self.num_opened = 0
        self.most_open = 0
        self.chunks: list[int] = []
        self.num_steps = 0

    def open_sequence(self) -> FakeSequence:
        handle = FakeSequence()
        self.open_handles.add(handle)
        self.num_opened += 1
        self.most_open = max(self.most_open, len(self.open_handles))
        return handle

    def close_sequence(self, handle: FakeSequence, *, scrub: bool = False) -> None:
        self.open_handles.remove(handle)

    def prefill(self, handle: FakeSequence, token_ids: list[int], *, final: bool) -> Tensor | None:
        assert handle in self.open_handles
        self.prefill_fault(handle, token_ids)
        time.sleep(self.delay_s)
        self.chunks.append(len(token_ids))
        handle.token_ids += token_ids
        handle.num_prompt = len(handle.token_ids)
        return self._logits(handle) if final else None

    def step(self, batch: list[tuple[FakeSequence, list[int]]]) -> Tensor:
        self.step_fault([handle for handle, _ in batch])
        time.sleep(self.delay_s)
        self.num_steps += 1
        rows = []
        for handle, token_ids in batch:
            assert handle in self.open_handles
            for token_id in token_ids:
                handle.token_ids.append(token_id)
                rows.append(self._logits(handle))
        return torch.stack(rows)

    def _logits(self, handle: FakeSequence) -> Tensor:
        return self.spoil(handle, self.clean_logits(handle))

    def clean_logits(self, handle: FakeSequence) -> Tensor:
        """The logits after a sequence, before `spoil`."""
        ids = torch.arange(self.vocab_size, dtype=torch.float64)
        salt = 31.0 * handle.num_tokens + 7.0 * handle.token_ids[-1]
        logits = torch.sin(ids * 12.9898 + salt).float()
        answer = self.script(handle.token_ids[: handle.num_prompt])
        index = handle.num_tokens - handle.num_prompt
        logits[answer[index] if index < len(answer) else 1] += self.strength
        return logits


class FakeDraft:
    """Drafts of one sequence: the model's own logits, off by `error`."""

    def __init__(self, runner: "DraftingRunner", handle: FakeSequence, last: int) -> None:
        self.runner = runner
        self.size = runner.block_size
        self.ahead = FakeSequence()
        self.ahead.token_ids = [*handle.token_ids]
        self.ahead.num_prompt = handle.num_prompt

    def __len__(self) -> int:
        return self.size

    def refine(self, i: int, previous: int) -> tuple[Tensor, float]:
        assert i < self.size
        self.runner.refine_fault(self.ahead, i)
        self.ahead.token_ids.append(previous)
        logits = self.runner.clean_logits(self.ahead)
        ids = torch.arange(self.runner.vocab_size)
        logits = logits + self.runner.error * torch.cos(ids * 7.77 + self.ahead.num_tokens).float()
        return self.runner.spoil_draft(i, logits), self.runner.confidence


class DraftingRunner(FakeRunner):
    """A fake runner with a drafter. `refused` sequences cannot be drafted for."""

    def __init__(
        self, *args: object, block_size: int = 5, error: float = 0.5, **options: object
    ) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.block_size = block_size
        self.error = error
        self.confidence = 3.0
        self.refused: Callable[[FakeSequence], bool] = lambda s: False
        self.draft_fault: Callable[[list[FakeSequence]], None] = lambda s: None
        self.refine_fault: Callable[[FakeSequence, int], None] = lambda s, i: None
        self.spoil_draft: Callable[[int, Tensor], Tensor] = lambda i, logits: logits
        self.scrubbed: list[FakeSequence] = []
        self.num_free = 0
        self.device = "cpu"

    def draft(self, batch: list[tuple[FakeSequence, int]]) -> list[FakeDraft]:
        self.draft_fault([handle for handle, _ in batch])
        for handle, _ in batch:
            if self.refused(handle):
                raise StateError("the drafter is cold")
        return [FakeDraft(self, handle, last) for handle, last in batch]

    def commit(self, handle: FakeSequence, num_tokens: int) -> None:
        assert 0 < num_tokens <= handle.num_tokens
        del handle.token_ids[num_tokens:]

    def close_sequence(self, handle: FakeSequence, *, scrub: bool = False) -> None:
        if scrub:
            self.scrubbed.append(handle)
        super().close_sequence(handle)


class ParkingRunner(FakeRunner):
    """A fake runner that preempts, with a fault on either way."""

    def __init__(self, *args: object, num_sequences: int = 2, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.num_sequences = num_sequences
        self.park_fault: Callable[[FakeSequence], None] = lambda s: None
        self.unpark_fault: Callable[[FakeSequence], None] = lambda s: None

    def park(self, handle: FakeSequence) -> FakeSequence:
        self.park_fault(handle)
        self.close_sequence(handle)
        return handle

    def unpark(self, parked: FakeSequence) -> FakeSequence:
        self.unpark_fault(parked)
        handle = self.open_sequence()
        handle.token_ids, handle.num_prompt = parked.token_ids, parked.num_prompt
        return handle


class JoiningRunner(FakeRunner):
    """A fake runner that reads parts of several prompts at once, with a fault on demand.

    `joint_fault` is called with the sequences, once those that it `touches` have their part.
    """

    def __init__(self, *args: object, joint_rows: int = 12, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.joint_rows = joint_rows
        self.joint_fault: Callable[[list[FakeSequence]], None] = lambda sequences: None
        self.touches: Callable[[FakeSequence], bool] = lambda s: False
        self.apart: Callable[[FakeSequence], bool] = lambda s: False
        self.joint: list[list[int]] = []

    def joins(self, handle: FakeSequence, num_tokens: int) -> bool:
        return num_tokens <= self.max_step_rows and not self.apart(handle)

    def prefill_together(self, batch: list[tuple[FakeSequence, list[int]]]) -> list[Tensor]:
        assert len(batch) > 1 and sum(len(ids) for _, ids in batch) <= self.joint_rows
        for handle, token_ids in batch:
            assert handle in self.open_handles
            if self.touches(handle):
                handle.token_ids += token_ids
        self.joint_fault([handle for handle, _ in batch])
        self.joint.append([len(ids) for _, ids in batch])
        for handle, token_ids in batch:
            handle.token_ids += token_ids
            handle.num_prompt = len(handle.token_ids)
        return [self._logits(handle) for handle, _ in batch]
