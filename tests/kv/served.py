"""The same requests to two servers, one with the KV cache and one without."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx

from deepdraft.config import Config, EngineConfig, FleetConfig, ServerConfig
from deepdraft.engine.load import LoadedModel
from deepdraft.engine.runner import Runner
from deepdraft.engine.speculate import Speculation
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.proof.tiny import RandomWeights, tiny_args
from deepdraft.server.app import create_app
from deepdraft.server.service import Service
from deepdraft.spec.schedule import FixedSchedule
from deepdraft.text.tokenizer import Tokenizer
from tests.server.toy import BOS, EOS, tokenizer_file

Json = dict[str, Any]
CONTEXT = 2048
_OWN = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "usage"}
_OWN.add("encrypted_content")
"""Fields that two right answers may differ in: names, times, and what came from the cache."""


def tiny_model(tokenizer: Tokenizer, numerics: str = "exact") -> DeepseekV41:
    """Random weights over the toy vocabulary, with a drafter."""
    size = tokenizer.vocab_size
    args = dataclasses.replace(
        tiny_args(),
        vocab_size=size,
        engram_compressed_vocab_size=size,
        max_position_embeddings=CONTEXT,
    )
    weights = RandomWeights(args)
    return DeepseekV41(args, weights, list(range(size)), numerics=numerics)


def load_tiny(
    tokenizer: Tokenizer, model: DeepseekV41, options: EngineConfig, **more: Any
) -> LoadedModel:
    """A loaded model over `model`; several may share its weights."""
    runner = Runner(
        model,
        prefill=options.prefill,
        max_context=CONTEXT,
        num_sequences=options.max_running,
        step_rows=16,
        num_drafts=options.drafts,
    )
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        args=model.args,
        name="tiny",
        eos_token_id=EOS,
        bos_token_id=BOS,
        fingerprint="fp_tiny",
        speculation=Speculation(schedule=FixedSchedule(num_drafts=runner.block_size)),
        **more,
    )


class Peer:
    """A served model, called in process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: DeepseekV41,
        *,
        server: Json | None = None,
        fleet: Json | None = None,
        **engine: Any,
    ) -> None:
        config = Config(
            engine=EngineConfig(prefill_chunk=64, **engine),
            server=ServerConfig(**(server or {})),
            fleet=FleetConfig(**(fleet or {})),
        )
        self.service = Service(lambda: load_tiny(tokenizer, model, config.engine), config)
        self.service.start()
        assert self.service.wait(600)
        assert self.service.state == "ready", self.service.failure
        self.app = create_app(self.service)

    def post(self, path: str, body: Json, headers: Json | None = None) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
                return await client.post(path, json=body, headers=headers, timeout=600)

        response = asyncio.run(run())
        engine = self.service._engine
        if engine is not None and engine.reuse is not None:
            engine.reuse.cache.flush()  # the next request finds what this one left
        return response

    def stats(self) -> dict[str, int]:
        return self.service.stats()

    @property
    def cache(self) -> Any:
        engine = self.service._engine
        assert engine is not None and engine.reuse is not None
        return engine.reuse.cache

    def close(self) -> None:
        self.service.close()


def told(response: httpx.Response) -> tuple[Any, int]:
    """What an answer says, and how many tokens came from the cache."""
    text = response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
        values = [json.loads(line) for line in lines if line != "[DONE]"]
    else:
        values = [response.json()]
    assert response.status_code == 200, text
    return _plain(values), max(map(_cached, values), default=0)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in _OWN}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _cached(value: Any) -> int:
    if not isinstance(value, dict):
        return 0
    usage = value.get("usage") or value.get("response", {}).get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))


def toy_tokenizer(directory: Path) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    return Tokenizer.load(tokenizer_file(directory))
