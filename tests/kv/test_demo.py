"""Turns of a real conversation on the bundled model: the cache changes nothing but the work."""

import pytest

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.kv.layout import Layout
from deepdraft.kv.settings import StoreSettings
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.server.service import bundled_checkpoint
from deepdraft.text.conversation import Conversation, Message
from deepdraft.text.prompt import render_chat
from deepdraft.text.tokenizer import Tokenizer
from tests.kv.conftest import Served
from tests.kv.test_exact import both

SYSTEM = "You answer briefly, in plain words, and you say so when you do not know. " * 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(bundled_checkpoint())


@pytest.mark.parametrize("numerics", ["exact", "quant"])
def test_turns_and_a_shared_system_prompt(numerics: str, tokenizer: Tokenizer) -> None:
    runner = Runner.from_checkpoint(
        Checkpoint.open(bundled_checkpoint()),
        tokenizer,
        numerics=numerics,
        max_context=64,
        drafter=True,
    )
    assert isinstance(runner.model, DeepseekV41)
    served = Served(
        runner.model,
        context=2048,
        settings=StoreSettings(),
        layout=Layout.of(runner.model.args, packed=numerics == "quant"),
        max_bytes=256 << 20,
    )

    def prompt(*texts: str) -> list[int]:
        roles = ("user", "assistant")
        messages = [Message(role="system", content=SYSTEM)]
        messages += [Message(role=roles[i % 2], content=t) for i, t in enumerate(texts)]  # type: ignore
        chat = Conversation(messages=tuple(messages), thinking=False)
        return list(render_chat(chat, tokenizer, "v4.1").token_ids)

    first = prompt("What is the capital of France?")
    assert both(served, first) == "none"
    second = prompt("What is the capital of France?", "Paris.", "And of Italy?")
    start = int(both(served, second).split("/")[0])
    assert start == len(first) - 1  # the checkpoint before the prompt's last token
    story = prompt("Tell me a story.")
    both(served, story)  # leaves a checkpoint where it parts from the first conversation
    shared = next(i for i, (a, b) in enumerate(zip(first, story, strict=False)) if a != b)
    kind = both(served, prompt("Who are you?"))
    assert int(kind.split("/")[0]) == shared > 64
