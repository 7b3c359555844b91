"""The engine's runner on models of every family: the interface is that of V4.1."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepdraft.engine.runner import Runner
from deepdraft.errors import ConfigError
from tests.families.conftest import SETS, text_of


@pytest.mark.parametrize("name", SETS)
def test_prompt_steps_and_roll_back(name: str, load: Callable[[str], Any]) -> None:
    model, text = load(name), text_of(name)[:40]
    runner = Runner(model, max_context=60, num_sequences=2, step_rows=16)
    whole = model.prefill(model.new_pool(1, 60, slack=64).open(), text, logits="all").logits
    a, b = runner.open_sequence(), runner.open_sequence()
    assert runner.prefill(a, text[:7], final=False) is None
    logits = runner.prefill(a, text[7:20], final=True)
    assert logits is not None and torch.equal(logits, whole[19])
    runner.prefill(b, text[:30], final=True)
    both = runner.step([(a, text[20:24]), (b, text[30:31])])
    assert torch.equal(both, whole[[20, 21, 22, 23, 30]])
    runner.commit(a, 22)  # two drafts are taken back
    assert a.num_tokens == 22
    assert torch.equal(runner.step([(a, text[22:23])])[0], whole[22])
    runner.close_sequence(a, scrub=True)
    runner.close_sequence(b)
    assert runner.vocab_size == 512 and runner.max_tokens == 60


def test_settings_of_another_family(load: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="without a drafter"):
        Runner(load("llama-a"), num_drafts=3)
    runner = Runner(load("llama-a"), prefill="encoder", max_context=20)
    with pytest.raises(ConfigError, match="prefill in full"):
        runner.prefill(runner.open_sequence(), [3, 4], final=True)
