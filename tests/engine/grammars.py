"""Grammars for tests: compilers of the demo tokenizer, sources, answers drawn from masks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepdraft.engine.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarSource,
    Matcher,
    Start,
    compiler_for,
)
from deepdraft.engine.lark import Rules, choice_rule, json_rule, regex_rule
from deepdraft.server.service import bundled_checkpoint
from deepdraft.text.tokenizer import Tokenizer

EOS_TEXT = "<｜end▁of▁sentence｜>"
DEMO = Tokenizer.load(bundled_checkpoint())


def compiler(tokenizer: Tokenizer = DEMO, extra: int = 0) -> GrammarCompiler:
    eos = tokenizer.id_of(EOS_TEXT)
    assert eos is not None
    return compiler_for(tokenizer, tokenizer.vocab_size + extra, eos)


def json_source(schema: Any, start: Start = "at_once", prefix: str = "") -> GrammarSource:
    rules = Rules()
    return GrammarSource(lark=rules.text(json_rule(rules, schema)), start=start, prefix=prefix)


def compiled(schema: Any, tokenizer: Tokenizer = DEMO, **options: Any) -> Grammar:
    return compiler(tokenizer).compile(json_source(schema, **options))


def choices(texts: Sequence[str], tokenizer: Tokenizer = DEMO, extra: int = 0) -> Grammar:
    rules = Rules()
    return compiler(tokenizer, extra).compile(
        GrammarSource(lark=rules.text(choice_rule(rules, texts)))
    )


def pattern(text: str) -> Grammar:
    rules = Rules()
    return compiler().compile(GrammarSource(lark=rules.text(regex_rule(rules, text))))


def accepts(grammar: Grammar, text: str, tokenizer: Tokenizer = DEMO) -> bool:
    """Every token of `text` is in its mask, and the answer may end behind it."""
    matcher = grammar.matcher()
    for token_id in tokenizer.encode_text(text):
        mask = matcher.mask()
        taken = matcher.advance(token_id)
        assert taken == (mask is None or bool(mask[token_id]))
        if not taken:
            return False
    mask = matcher.mask()
    return mask is None or bool(mask[grammar.compiler.eos_token_id])


class Walker:
    """Draws answers from masks with random logits; ends long texts when it may."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        closing = set('"}],:0123456789-x>')
        self.tokenizer = tokenizer
        ends = [tokenizer.id_of(text) for text in ("｜DSML｜", "</", "<", "/")]
        self.enders = [i for i in ends if i is not None]
        self.closers = np.array(
            [
                0 < len(text) < 4 and set(text.decode("latin-1")) <= closing
                for text in map(tokenizer.token_bytes, range(tokenizer.vocab_size))
            ]
        )

    def walk(
        self, matcher: Matcher, seed: int, most: int = 300, *, calls: bool = False
    ) -> list[int] | None:
        """The tokens of a whole answer without its end, None where there was none in `most`.

        `calls`: what ends is raw text in a call, not a JSON string.
        """
        rng = np.random.default_rng(seed)
        eos = matcher.grammar.compiler.eos_token_id
        out: list[int] = []
        while not matcher.is_finished:
            if len(out) == most:
                return None
            mask = matcher.mask()
            assert mask is not None and mask.any()
            scores = rng.gumbel(size=mask.shape[0])
            if len(out) > 24:
                scores[self.closers] += 12
                if calls:
                    scores[self.enders] += 18
                scores[eos] += 20
            scores[~mask] = -np.inf
            token_id = int(scores.argmax())
            assert matcher.advance(token_id)
            if token_id == eos:
                break
            out.append(token_id)
        return out


WALKER = Walker(DEMO)
