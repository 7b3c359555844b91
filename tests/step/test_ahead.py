"""Requests that the device decodes by itself, through the real engine.

The layers are the table of test_loop; engine, scheduler, sampler and the loop's kernels are real.
"""

from types import SimpleNamespace

import pytest
import torch

from deepdraft.engine import ahead
from deepdraft.engine.ahead import Ahead
from deepdraft.engine.engine import Engine
from deepdraft.errors import StateError
from deepdraft.models.v41_loop import DeviceLoop
from deepdraft.types import GenerateRequest, SamplingParams, SpeculationParams
from tests.kernels.interpreter import DEVICE
from tests.step.test_loop import Drafter, Layers, V, table


class Handle:
    """A sequence: its slot and tokens."""

    def __init__(self, slot: int) -> None:
        self.slot, self.token_ids = slot, []
        self.decoder_tokens = self.drafter_tokens = self.written = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class TableRunner:
    """A runner whose logits stand in a table by position; without `ahead` the host does all."""

    vocab_size, max_tokens, max_step_rows, num_sequences, block_size = V, 150, 16, 3, 3
    device = torch.device(DEVICE)

    def __init__(self) -> None:
        self.table = table(1)
        self.free = [2, 1, 0]
        self.host_steps = self.loops = 0
        nothing = SimpleNamespace(prepare=lambda *a: None, note_tokens=lambda *a: None)
        self.pool, self.model = nothing, self

    def open_sequence(self) -> Handle:
        return Handle(self.free.pop())

    def close_sequence(self, handle: Handle, *, scrub: bool = False) -> None:
        self.free.append(handle.slot)

    def prefill(self, handle: Handle, token_ids, *, final: bool):
        handle.token_ids.extend(token_ids)
        return self.table[handle.num_tokens - 1] if final else None

    def step(self, batch):
        self.host_steps += 1
        rows = []
        for handle, ids in batch:
            for token in ids:
                handle.token_ids.append(token)
                rows.append(self.table[handle.num_tokens - 1])
        return torch.stack(rows)

    def commit(self, handle: Handle, num_tokens: int) -> None:
        del handle.token_ids[num_tokens:]

    def draft(self, batch):
        raise StateError("the host does not draft here")

    def feed_pending(self, *handles: Handle) -> None:
        pass


class AheadRunner(TableRunner):
    """The same, with decoding on the device."""

    def ahead(self) -> Ahead:
        return Ahead(self)

    def make_loop(self, settings, *, sequences: int, width: int, **choice) -> DeviceLoop:
        self.loops += 1
        layers = Layers([self.table] * self.num_sequences)
        drafter = Drafter(layers, 5) if width > 1 else None
        return DeviceLoop(
            layers, settings, sequences=sequences, width=width, drafter=drafter, **choice
        )

    def synchronize(self) -> None:
        pass


def request(name: str, prompt: int, count: int, **settings) -> GenerateRequest:
    stops = settings.pop("stops", ())
    speculation = settings.pop("speculation", SpeculationParams())
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(range(1, prompt + 1)),
        max_new_tokens=count,
        sampling=SamplingParams(**{"temperature": 0.0, **settings}),
        stop_token_ids=frozenset(stops),
        speculation=speculation,
    )


def serve(runner: TableRunner, *requests: GenerateRequest) -> dict[str, list[int]]:
    """All requests at once; their tokens."""
    engine = Engine(runner)
    found: dict[str, list[int]] = {r.request_id: [] for r in requests}
    ends: dict[str, str] = {}
    sinks = []
    for r in requests:

        def sink(event, name=r.request_id) -> None:
            found[name].extend(event.token_ids)
            if event.finish_reason is not None:
                ends[name] = event.finish_reason

        sinks.append(sink)
    engine.submit(requests, sinks)
    engine.start()
    engine.drain(120.0)
    engine.close()
    assert set(ends.values()) <= {"stop", "length"}, ends
    return found


def expected(runner: TableRunner, prompt: int, count: int) -> list[int]:
    return runner.table[prompt - 1 : prompt - 1 + count].argmax(1).tolist()


def test_requests_join_and_leave_and_lose_no_token():
    runner = AheadRunner()
    found = serve(runner, request("a", 4, 14), request("b", 9, 5), request("c", 20, 9))
    assert found["a"] == expected(runner, 4, 14)
    assert found["b"] == expected(runner, 9, 5)
    assert found["c"] == expected(runner, 20, 9)
    assert runner.host_steps == 0 and runner.loops >= 2


def test_sampled_text_is_the_hosts():
    settings = {"temperature": 1.0, "seed": 11}
    host = serve(TableRunner(), request("a", 4, 10, **settings))
    assert serve(AheadRunner(), request("a", 4, 10, **settings)) == host


def test_a_request_that_needs_the_host_is_decoded_there_and_the_device_goes_on_after_it():
    runner = AheadRunner()
    found = serve(runner, request("a", 4, 12), request("k", 9, 3, logprobs=1))
    assert found["a"] == expected(runner, 4, 12) and found["k"] == expected(runner, 9, 3)
    assert 0 < runner.host_steps < 11


def test_a_stop_id_ends_the_answer():
    runner = AheadRunner()
    whole = expected(runner, 4, 12)
    found = serve(runner, request("a", 4, 12, stops=[whole[5]]))
    assert found["a"] == whole[: whole.index(whole[5]) + 1]


def test_a_device_that_fails_ends_the_request_and_the_host_serves_the_next(monkeypatch):
    runner = AheadRunner()
    monkeypatch.setattr(ahead, "_WAIT_S", 0.05)
    engine = Engine(runner)
    engine.start()
    monkeypatch.setattr(DeviceLoop, "launch", lambda self: None)
    events = list(engine.generate(request("a", 4, 5)))
    assert events[-1].finish_reason == "error"
    assert "no report within" in str(events[-1].error)
    events = list(engine.generate(request("b", 4, 5)))
    assert [t for e in events for t in e.token_ids] == expected(runner, 4, 5)
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 2}, {"stops": range(9)}, {"speculation": SpeculationParams(num_drafts=1)},
        {"speculation": SpeculationParams(steps=True)},
    ],
)  # fmt: skip
def test_what_the_device_does_not_choose_stays_with_the_host(settings):
    from deepdraft.engine.request import Request

    assert ahead.qualifies(Request(request("a", 4, 5), lambda event: None))
    assert not ahead.qualifies(Request(request("a", 4, 5, **settings), lambda event: None))


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.7, "top_k": 7},
        {
            "min_p": 0.05, "presence_penalty": 1.5, "frequency_penalty": 0.7,
            "repetition_penalty": 1.3, "logit_bias": ((3, 4.0), (5, -9.0)),
        },
    ],
)  # fmt: skip
def test_every_setting_gives_the_hosts_text(settings):
    """Penalties count what was put out before, by the host and by drafts of the same step."""
    settings = {"temperature": 1.0, "seed": 4} | settings
    runner = AheadRunner()
    host = serve(TableRunner(), request("a", 4, 10, **settings))
    assert serve(runner, request("a", 4, 10, **settings)) == host
    assert runner.host_steps == 0
