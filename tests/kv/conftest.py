"""A tiny model and a cache over it: window 16, so that recomputing 8 layers' windows takes 121
tokens, blocks of 8 tokens, chunks of 2 blocks."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepdraft.engine.runner import Runner
from deepdraft.kv.cache import KvCache, Resumed
from deepdraft.kv.directory import LocalDirectory
from deepdraft.kv.fleet import Fleet
from deepdraft.kv.layout import Layout
from deepdraft.kv.settings import StoreSettings, TransferSettings
from deepdraft.kv.snapshot import fingerprint
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.state import SequenceState
from deepdraft.proof.tiny import RandomWeights, tiny_args

CONTEXT, SLACK = 512, 8
FINGERPRINT = fingerprint({"model": "tiny", "numerics": "exact"})
SETTINGS = StoreSettings(chunk_blocks=2, min_tokens=1)
FAST = TransferSettings(connect_s=2, deadline_s=20, idle_s=1.0, backoff_s=0.05)
MakeFleet = Callable[..., Fleet]
ModelOf = Callable[[str], DeepseekV41]


@pytest.fixture(scope="session")
def model_of() -> ModelOf:
    """The tiny model in a numerics mode."""
    made: dict[str, DeepseekV41] = {}

    def get(numerics: str) -> DeepseekV41:
        if numerics not in made:
            args = tiny_args()
            made[numerics] = DeepseekV41(
                args, RandomWeights(args), list(range(args.vocab_size)), numerics=numerics
            )
        return made[numerics]

    return get


@pytest.fixture(scope="session")
def model(model_of: ModelOf) -> DeepseekV41:
    return model_of("exact")


@pytest.fixture
def directory() -> LocalDirectory:
    return LocalDirectory()


@pytest.fixture
def join(directory: LocalDirectory) -> Iterator[MakeFleet]:
    """Servers that share one directory."""
    fleets: list[Fleet] = []

    def make(cache: KvCache, name: str, **options: Any) -> Fleet:
        starts = options.pop("starts", True)
        settings: Any = {"rule": "always", "settings": FAST, **options}
        fleet = Fleet(cache, lambda: directory, name=name, **settings)
        if starts:
            fleet.start()
            fleet.flush()  # it has announced itself
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        fleet.close()
        fleet.cache.check()
        fleet.cache.memory.check()
        stats = fleet.cache.stats()
        assert (stats["pins"], stats["leases"]) == (0, 0)


def text(seed: int, n: int) -> list[int]:
    """Token ids, the same for a seed."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(4, 256, (n,), generator=g).tolist()


def wait_for(ready: Callable[[], bool]) -> None:
    """Until that is so."""
    pause = threading.Event()
    for _ in range(3000):
        if ready():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come")


class Served:
    """A runner and a cache, used as docs/kv-sharing.md says an engine uses them."""

    def __init__(
        self,
        model: DeepseekV41,
        *,
        mode: Any = "full",
        reuse: Any = "exact",
        rebuild: bool = True,
        max_bytes: int = 64 << 20,
        sequences: int = 8,
        num_drafts: int | None = None,
        layout: Layout | None = None,
        expected: bytes = FINGERPRINT,
        context: int = CONTEXT,
        **options: Any,
    ) -> None:
        self.model = model
        self.runner = Runner(
            model,
            prefill=mode,
            max_context=context,
            num_sequences=sequences,
            step_rows=SLACK,
            num_drafts=num_drafts,
        )
        packed = model.num.name != "exact"
        self.cache = KvCache(
            self.runner.pool,
            expected=expected,
            layout=layout or Layout.of(model.args, packed=packed, block_tokens=8),
            max_bytes=max_bytes,
            mode=mode,
            reuse=reuse,
            drafter=self.runner.block_size > 0,
            rebuilder=model if rebuild else None,
            **{"settings": SETTINGS, **options},
        )

    def answer(
        self, prompt: Sequence[int], steps: int = 3, *, cached: bool = True, keep: bool = True
    ) -> tuple[list[int], Tensor, Resumed | None, SequenceState]:
        """Greedy tokens, the logits they come from, what was reused, and the open sequence."""
        runner, cache = self.runner, self.cache
        state = runner.open_sequence()
        resumed = cache.resume(prompt, state) if cached else None
        at = resumed.num_tokens if resumed else 0
        captured = []
        for end in [p for p in cache.points(prompt) if p > at] if keep else []:
            runner.prefill(state, prompt[at:end], final=False)
            checkpoint = cache.capture(state)
            assert checkpoint is not None
            captured.append(checkpoint)
            at = end
        logits = [runner.prefill(state, prompt[at:], final=True)]
        assert logits[0] is not None
        tokens = [int(logits[0].argmax())]
        for _ in range(steps):
            logits.append(runner.step([(state, [tokens[-1]])])[-1])
            tokens.append(int(logits[-1].argmax()))  # type: ignore[union-attr]
        if keep:
            if runner.block_size:
                runner.draft([(state, tokens[-1])])  # feeds the drafter up to the last token
            assert cache.store(state, captured)
            cache.flush()
        return tokens, torch.stack(logits), resumed, state  # type: ignore[arg-type]

    def drafts(self, state: SequenceState, token: int) -> list[Tensor]:
        """Logits of a greedy block of drafts after `token`."""
        draft = self.runner.draft([(state, token)])[0]
        out = []
        for i in range(len(draft)):
            logits, _ = draft.refine(i, token)
            token = int(logits.argmax())
            out.append(logits)
        return out

    def close(self, state: SequenceState) -> None:
        self.runner.close_sequence(state)
