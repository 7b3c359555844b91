"""What is said of a long prompt while it is read."""

import itertools

from deepdraft.engine.reading import Reading
from deepdraft.engine.request import Request
from deepdraft.types import GenerateRequest


def test_progress_comes_now_and_then_with_the_rate_of_late() -> None:
    request = Request(GenerateRequest(request_id="r", prompt_ids=(1,) * 1000), lambda event: None)
    request.opened = 50.0
    reading, told = Reading(), []
    # Its first 200 tokens came from the KV cache; then 100 tokens in 0.5 s, later in 1 s.
    for start, now in ((200, 50.5), (300, 51.0), (400, 52.0), (500, 53.0), (600, 53.4)):
        request.num_computed = start + 100
        told.append(reading.after(request, start, now))
    assert [p and (p.done, p.total) for p in told] == [
        None, (400, 1000), (500, 1000), (600, 1000), None,
    ]  # fmt: skip
    assert [p.tokens_per_second for p in told if p] == [200.0, 100.0, 100.0]
    assert [p.seconds_left for p in told if p] == [3.0, 5.0, 4.0]


def test_short_prompts_say_nothing() -> None:
    request = Request(GenerateRequest(request_id="r", prompt_ids=(1, 2, 3)), lambda event: None)
    request.opened, request.num_computed = 5.0, 2
    assert Reading().after(request, 0, 5.0) is None


def test_events_thin_out_over_a_very_long_prompt() -> None:
    """Clients of Go end a stream that brings 300 lines without data; an event is two of them."""
    request = Request(GenerateRequest(request_id="r", prompt_ids=(1,) * 4000), lambda event: None)
    reading, told = Reading(), []
    for second in range(1, 3600):
        request.num_computed = second
        if reading.after(request, second - 1, float(second)):
            told.append(second)
    assert told[:10] == list(range(1, 11)) and len(told) < 150
    assert max(b - a for a, b in itertools.pairwise(told)) < 200
