"""Grammars over tokens: which token may come next, at every position of an answer.

Owns: compiling with its limits and cache, the phases of an answer (free reasoning, then the form),
and `Matcher`, the state of one answer. The automata are llguidance's.
Knows nothing of: logits, sampling, requests, HTTP. How grammars are written is in `lark`.
"""

import re
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import llguidance
import numpy as np

from deepdraft.errors import RequestError
from deepdraft.text.control import CALL_BEGIN, CALLS_BEGIN
from deepdraft.text.tokenizer import Tokenizer

Start = Literal["at_once", "after_reasoning", "at_call", "at_marked_call"]

THINK_END = "</think>"
CALL_MARKER = "｜DSML｜"

MAX_GRAMMAR_BYTES = 1 << 20
MAX_CACHED = 128
RENEWAL_TOKENS = 64
"""Tokens for which a new automaton must last on average, or the grammar is too complex."""

_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=10_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)
_PLACE = re.compile(r"^at \d+\(\d+\): |^\d+\(\d+\): ")
_PREFIXES = ("failed to compile JSON schema: ", 'failed to parse "%json": ')

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class GrammarError(RequestError):
    """A grammar became too complex, or allows no token any more, in the middle of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """What is to be enforced, and from where on.

    `at_once`: from the first token, behind the text `prefix` that stands in the prompt already.
    `after_reasoning`: behind the first `</think>` token; until then neither the end of the answer
    nor a call is allowed. `at_call`: behind the first call marker that follows a `<`, or
    (`at_marked_call`) behind the mark that opens a block of calls; an answer without one is free
    to the end.
    """

    lark: str
    start: Start = "at_once"
    prefix: str = ""


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the latest of them. Thread-safe.

    Compiling takes milliseconds and releases the interpreter lock; no two compile at a time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_id: int,
        more_ends: frozenset[int] = frozenset(),
    ) -> None:
        """`vocab_size`: of the model's logits; ids without a token are never allowed. `more_ends`:
        other tokens that end an answer."""
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.ends = [eos_token_id, *sorted(more_ends)]
        self._encode = tokenizer.encode_text
        self._endings = tokenizer.token_bytes
        self._think_end = tokenizer.id_of(THINK_END)
        self._call_marker = tokenizer.id_of(CALL_MARKER)
        self._calls_begin = tokenizer.id_of(CALLS_BEGIN)
        self._call_begin = tokenizer.id_of(CALL_BEGIN)
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_id)),
            n_vocab=vocab_size,
            eos_token=eos_token_id,
        )
        self._cache: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, source: GrammarSource) -> "Grammar":
        """The grammar. Raises RequestError where it cannot be enforced or allows nothing."""
        with self._lock:
            grammar = self._cache.get(source)
            if grammar is None:
                grammar = self._compile(source)
                self._cache[source] = grammar
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(source)
            return grammar

    def _compile(self, source: GrammarSource) -> "Grammar":
        size = len(source.lark.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} go")
        trigger = {
            "after_reasoning": self._think_end,
            "at_call": self._call_marker,
            "at_marked_call": self._calls_begin,
        }.get(source.start)
        if source.start != "at_once" and trigger is None:
            raise RequestError("this model's tokenizer lacks the tokens of reasoning or calls")
        free = None
        if source.start in ("after_reasoning", "at_marked_call"):
            free = np.ones(self.vocab_size, dtype=np.bool_)
            forbidden = [self._call_begin]  # read as a call by itself
            if source.start == "after_reasoning":
                forbidden += [*self.ends, self._call_marker, self._calls_begin]
            free[[mark for mark in forbidden if mark is not None]] = False
        return Grammar(self, source, free, trigger)

    def automaton(self, source: GrammarSource) -> llguidance.LLMatcher:
        """A new automaton, with the prefix taken. Raises RequestError."""
        automaton = llguidance.LLMatcher(self._vocabulary, source.lark, log_level=0, limits=_LIMITS)
        if automaton.is_error():
            raise RequestError(_reason(automaton))
        if automaton.get_grammar_warnings():
            # The library warns where it leaves something out.
            raise RequestError(_gist(automaton.get_grammar_warnings()[0]))
        ids = self._encode(source.prefix)
        if automaton.try_consume_tokens(ids) != len(ids):
            raise RequestError(
                "the last message, which is to be continued, is no beginning of what the answer "
                "must be"
            )
        return automaton

    def ends_with_bracket(self, token_id: int) -> bool:
        """The token's text ends with `<`."""
        return self._endings(token_id).endswith(b"<")


_compilers: "weakref.WeakKeyDictionary[Tokenizer, dict[tuple, GrammarCompiler]]" = (
    weakref.WeakKeyDictionary()
)
_compilers_lock = threading.Lock()


def compiler_for(
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_token_id: int,
    more_ends: frozenset[int] = frozenset(),
) -> GrammarCompiler:
    """The compiler of a tokenizer; the first call takes up to a second."""
    with _compilers_lock:
        known = _compilers.setdefault(tokenizer, {})
        key = (vocab_size, eos_token_id, more_ends)
        if key not in known:
            known[key] = GrammarCompiler(tokenizer, *key)
        return known[key]


class _Vocabulary:
    """Our tokenizer as the library wants to see one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._encode_text = tokenizer.encode_text
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.control_ids if i < vocab_size)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._encode_text(text)


def _reason(automaton: llguidance.LLMatcher) -> str:
    return _gist(automaton.get_error())


def _gist(message: str) -> str:
    """The gist of the library's message, which goes on with excerpts of the grammar."""
    lines = message.strip().splitlines() or ["unknown error"]
    first = _PLACE.sub("", lines[0])
    for prefix in _PREFIXES:
        first = first.removeprefix(prefix)
    if first.startswith("Unimplemented keys: "):
        keys = first.removeprefix("Unimplemented keys: ").strip("[]").replace('"', "")
        return f"these keywords of the schema are not served: {keys}"
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if details and "regex parse error" in first:
        return f"the pattern is not served: {details[0]}"
    return first[:500]


class Grammar:
    """A compiled grammar, shared by all answers that must follow it. Thread-safe."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        source: GrammarSource,
        free: Mask | None,
        trigger: int | None,
    ) -> None:
        """Raises RequestError for a grammar that cannot be enforced or allows nothing."""
        self.compiler = compiler
        self.source = source
        self.free = free
        """What is allowed before the form begins; None: everything."""
        self.trigger = trigger
        self._automaton = compiler.automaton(source)
        # The first mask is also where most grammars that are too complex fail.
        try:
            _allowed(self._automaton.deep_copy(), compiler)
        except GrammarError as error:
            raise RequestError(error.message) from error
        self._lock = threading.Lock()

    def matcher(self) -> "Matcher":
        """The state of a new answer."""
        return Matcher(self)

    def begin(self) -> llguidance.LLMatcher:
        """The automaton where the form begins; a copy of its own."""
        with self._lock:
            return self._automaton.deep_copy()

    def renew(self) -> llguidance.LLMatcher:
        """`begin` for an automaton that starts from nothing, as all later ones do.

        All copies of an automaton share what they have learnt, and the limits on that.
        """
        automaton = self.compiler.automaton(self.source)
        with self._lock:
            self._automaton = automaton
            return automaton.deep_copy()


def _allowed(automaton: llguidance.LLMatcher, compiler: GrammarCompiler) -> Mask:
    """The tokens [V] that may come next. The end of the answer counts where it may end here.

    Raises GrammarError.
    """
    bits = np.frombuffer(automaton.compute_bitmask(), dtype=np.uint8)
    if automaton.is_error() and "NoExtension" not in automaton.get_error():
        raise GrammarError(f"the grammar is too complex: {_reason(automaton)}")
    mask = np.unpackbits(bits, count=compiler.vocab_size, bitorder="little").view(np.bool_)
    # In a dead end the library sets this bit, too.
    mask[compiler.ends] = automaton.is_accepting()
    if not mask.any():
        raise GrammarError("the grammar allows nothing here: no answer can satisfy it")
    return mask


class Matcher:
    """Where one answer stands in its grammar. Not thread-safe."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._free: list[int] = []
        """Tokens before the form, the trigger included."""
        self._formed: list[int] = []
        """Tokens of the form."""
        self._ended = 0
        """Ends of the answer that were taken: 0 or 1."""
        self._renewals = 0
        self._automaton: llguidance.LLMatcher | None = None
        if grammar.trigger is None:
            self._automaton = grammar.begin()

    def mask(self) -> Mask | None:
        """The tokens [V] that may come next, None where that is all of them.

        The end of the answer is among them exactly where the answer may end. Raises GrammarError
        where nothing may, or where the grammar has become too complex.
        """
        compiler = self.grammar.compiler
        if self._ended:
            mask = np.zeros(compiler.vocab_size, dtype=np.bool_)
            mask[compiler.ends] = True
            return mask
        if self._automaton is None:
            return self.grammar.free
        try:
            return _allowed(self._automaton, compiler)
        except GrammarError:
            # Perhaps it is other answers, or drafts that were taken back, that used up the limits.
            if not self._renew():
                raise
        assert self._automaton is not None
        return _allowed(self._automaton, compiler)

    def advance(self, token_id: int) -> bool:
        """Takes one token; False, and nothing is changed, where it is not allowed."""
        if self._ended:
            return False
        if self._automaton is None:
            return self._advance_free(token_id)
        if token_id in self.grammar.compiler.ends:
            if not self._automaton.is_accepting():
                return False
            self._ended = 1
            return True
        if self._automaton.try_consume_tokens([token_id]) != 1 and not self._automaton.is_error():
            return False
        # A grammar that has become too complex at this token says so in the next mask.
        self._formed.append(token_id)
        return True

    def _advance_free(self, token_id: int) -> bool:
        grammar = self.grammar
        if grammar.free is not None and not grammar.free[token_id]:
            return False
        begins = token_id == grammar.trigger
        if begins and grammar.source.start == "at_call":
            begins = bool(self._free) and grammar.compiler.ends_with_bracket(self._free[-1])
        self._free.append(token_id)
        if begins:
            self._automaton = grammar.begin()
        return True

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""
        taken = self._ended + len(self._formed) + len(self._free)
        assert 0 <= num_tokens <= taken, f"{num_tokens=} {taken=}"
        if self._ended and num_tokens:
            self._ended, num_tokens = 0, num_tokens - 1
        back = min(num_tokens, len(self._formed))
        if back:
            self._take_back(back)
        num_tokens -= back
        if num_tokens:
            del self._free[-num_tokens:]
            self._automaton = None

    def _take_back(self, num_tokens: int) -> None:
        assert self._automaton is not None
        del self._formed[len(self._formed) - num_tokens :]
        if self._automaton.is_error() or not self._automaton.rollback(num_tokens):
            # An automaton never leaves an error, whatever it takes back. Without another one the
            # next mask says so.
            self._renew()

    def _renew(self) -> bool:
        """Goes on with a new automaton; False, and nothing is changed, after too many of them."""
        if self._renewals > 3 + self.num_tokens // RENEWAL_TOKENS:
            return False
        self._renewals += 1
        self._automaton = self.grammar.renew()
        for token_id in self._formed:
            self._automaton.try_consume_tokens([token_id])
        return True

    def clone(self) -> "Matcher":
        """A second state at the same place."""
        other = Matcher.__new__(Matcher)
        other.grammar = self.grammar
        other._free, other._formed = list(self._free), list(self._formed)
        other._ended, other._renewals = self._ended, self._renewals
        other._automaton = None if self._automaton is None else self._automaton.deep_copy()
        return other

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return self._ended + len(self._formed) + len(self._free)

    @property
    def is_finished(self) -> bool:
        """The answer is complete and nothing but its end may follow."""
        if self._ended:
            return True
        automaton = self._automaton
        return automaton is not None and automaton.is_stopped() and automaton.is_accepting()
