"""Prompts of a GPU runner that end badly, or come all at once: what is said, what is freed.

The engine, the runner and the pool are the real ones; what a chunk computes is left out.
"""

import contextlib
import threading

import pytest
import torch

from deepdraft.engine.engine import Engine
from deepdraft.engine.gpu_runner import GpuRunner
from deepdraft.errors import PromptTooLong
from deepdraft.models.v41_device import DeviceV41
from deepdraft.parallel.rank import PeerLost
from deepdraft.types import GenerateRequest, SamplingParams
from tests.step import tiny

CHUNK, CONTEXT, LONG = 16, 256, 200


class Chunks:
    """In place of `DevicePrefill`: keeps a sequence's marks, waits or fails where it is told to."""

    def __init__(self, model):
        self.model, self.seen, self.begun = model, [], threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.fail: dict[int, Exception] = {}

    def encode(self, state, ids, **_):
        self.seen.append((state.token_ids[0] if state.token_ids else ids[0], len(ids)))
        self.begun.set()
        assert self.go.wait(20)
        error = self.fail.pop(len(self.seen), None)
        if error is not None:
            raise error
        state.token_ids.extend(ids)
        state.written = max(state.written, state.num_tokens)
        state.tail = torch.zeros(1), torch.zeros(1)
        return len(ids)

    def replay(self, state, *, all_rows):
        assert not all_rows
        state.decoder_tokens, state.tail = state.num_tokens, None
        logits = torch.zeros(1, self.model.args.vocab_size)
        logits[0, state.token_ids[0]] = 1.0
        return logits, None, state.num_tokens - 1


@contextlib.contextmanager
def serving(monkeypatch, **options):
    model = DeviceV41(
        tiny.args(), tiny.source(), list(range(tiny.VOCABULARY)), device="cpu", drafter=False,
        prefill_chunk=CHUNK,
    )  # fmt: skip
    runner = GpuRunner(model, prefill="encoder", max_context=CONTEXT, num_sequences=2)
    chunks = Chunks(model)
    monkeypatch.setattr(model, "_prefill_of", lambda state: chunks)
    engine = Engine(runner, max_running=2, **options)
    engine.start()
    try:
        yield engine, runner, chunks
    finally:
        chunks.go.set()
        engine.close()
        engine._scheduler.check()
        assert runner.num_free == 2


class Asked:
    """A request and how it ended. The first token of its answer is its prompt's first."""

    def __init__(self, engine, name, prompt, tenant="default"):
        self.name, self.tokens, self.last = name, [], None
        self.ended = threading.Event()
        request = GenerateRequest(
            request_id=name, prompt_ids=tuple(prompt), max_new_tokens=1, reuse=False,
            sampling=SamplingParams(temperature=0.0), tenant=tenant,
        )  # fmt: skip
        engine.submit([request], [self.take])

    def take(self, event):
        self.tokens += event.token_ids
        if event.finish_reason is not None:
            self.last = event
            self.ended.set()

    def end(self):
        assert self.ended.wait(20), self.name
        return self.last.finish_reason


def prompt(first, count=LONG):
    return [first] + [(7 * i) % tiny.VOCABULARY for i in range(1, count)]


def test_one_token_over_the_limit(monkeypatch):
    with serving(monkeypatch) as (engine, runner, chunks):
        most = runner.max_tokens - 1  # room for the answer
        fits = Asked(engine, "fits", prompt(3, most))
        assert fits.end() == "length" and fits.tokens == [3]
        assert sum(n for _, n in chunks.seen) == most
        with pytest.raises(PromptTooLong, match=f"context is {most + 1} .* has {most + 1} and 1"):
            Asked(engine, "over", prompt(4, most + 1))
        assert len(chunks.seen) == -(-most // CHUNK)


def test_memory_that_is_gone_in_the_middle_ends_that_prompt_only(monkeypatch):
    with serving(monkeypatch) as (engine, _, chunks):
        chunks.fail[3] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        one = Asked(engine, "one", prompt(3))
        assert one.end() == "error" and "lower max_context" in one.last.error
        assert len(chunks.seen) == 3
        again = Asked(engine, "again", prompt(5))
        assert again.end() == "length" and again.tokens == [5]


def test_a_client_that_leaves_ends_its_prompt_with_the_chunk(monkeypatch):
    with serving(monkeypatch) as (engine, runner, chunks):
        chunks.go.clear()
        gone = Asked(engine, "gone", prompt(3))
        assert chunks.begun.wait(20)
        engine.cancel("gone")
        other = Asked(engine, "other", prompt(6, 20))
        chunks.go.set()
        assert gone.end() == "abort" and other.end() == "length" and other.tokens == [6]
        assert sum(first == 3 for first, _ in chunks.seen) == 1
    assert runner.num_free == 2


def test_a_lost_rank_ends_the_prompt_and_is_named(monkeypatch):
    with serving(monkeypatch) as (engine, _, chunks):
        chunks.fail[2] = PeerLost("rank 0 lost another rank: connection reset")
        one = Asked(engine, "one", prompt(3))
        assert one.end() == "error" and "lost another rank" in one.last.error


def test_a_storm_of_one_tenant_leaves_the_other_its_turn(monkeypatch):
    """Ten long prompts of one tenant wait when another's comes: it is not the last to be read."""
    with serving(monkeypatch) as (engine, _, chunks):
        chunks.go.clear()
        storm = [Asked(engine, f"s{i}", prompt(10 + i), "storm") for i in range(10)]
        assert chunks.begun.wait(20)
        calm = Asked(engine, "calm", prompt(40), "calm")
        chunks.go.set()
        assert calm.end() == "length" and calm.tokens == [40]
        waiting = sum(not one.ended.is_set() for one in storm)
        assert all(one.end() == "length" for one in storm)
        assert waiting >= 6, waiting
        # Whoever begins before it, begins among the first few.
        order = list(dict.fromkeys(first for first, _ in chunks.seen))
        assert order.index(40) <= 3, order
