"""Shared parts of the chat generators: the item record, wording variation, rendering.

Rendering is that of the engine: the prompt string comes from deepseek_recipe's V4.1 encoder, the
answer is appended to it. Knows nothing of packing or tokenizers.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
_ENCODER = recipe.DeepseekV41Encoding()


@dataclass
class Item:
    """One conversation with its answer.

    `turns` alternates user and assistant texts and ends with a user text. `think` is the short
    trace used when thinking is on. `key` decides train or validation (see `held_out`).
    """

    cls: str
    turns: list[str]
    answer: str
    think: str
    system: str | None = None  # None: free choice; "": none at all
    key: str = ""
    pinned: bool = False  # never held out
    tools: list[Any] | None = None
    history: list[Any] | None = None  # recipe messages instead of turns (tool loops)
    json_mode: bool = False


@dataclass
class Rendered:
    """Prompt and answer as text with control tokens; `held_out` items form the validation set."""

    cls: str
    prompt: str
    answer: str
    held_out: bool
    thinking: bool
    key: str


SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "You are a friendly assistant.",
    "You are an AI assistant. Answer the user.",
    "Be concise.",
    "Be helpful and polite.",
    "Answer in English.",
    "You are a careful assistant that gives short answers.",
    "You are deepdraft's demo model.",
    "Keep your answers short.",
    "You answer in one short sentence.",
    "You are a coding assistant.",
    "You are an expert programmer.",
    "You are a patient teacher.",
    "Give clear and simple answers.",
    "You are a chat assistant on a web page.",
)


def held_out(key: str) -> bool:
    """About one key in 40 is reserved for validation, by a fixed hash."""
    return zlib.crc32(key.encode()) % 40 == 0


def vary(rng: random.Random, text: str) -> str:
    """The same request as other people would type it: case, final mark, polite words."""
    roll = rng.random()
    if roll < 0.16:
        text = text[0].lower() + text[1:]
    elif roll < 0.24:
        text = text.lower()
    if rng.random() < 0.18 and text[-1] in "?.!":
        text = text[:-1]
    roll = rng.random()
    if roll < 0.04 and "lease" not in text:
        text = "Please " + text[0].lower() + text[1:]
    elif roll < 0.07 and "lease" not in text and text[-1] not in "?!":
        text = text.rstrip(".") + ", please."
    elif roll < 0.09:
        text = rng.choice(("Hi! ", "Hello, ", "Hey, ")) + text
    return text


def pick(rng: random.Random, options: Any) -> Any:
    """One element of a sequence."""
    return options[rng.randrange(len(options))]


def render(item: Item, rng: random.Random, *, thinking: bool | None = None) -> Rendered:
    """Render one item; mode, effort and system text are drawn from `rng` where free."""
    if thinking is None:
        thinking = rng.random() < 0.52
    effort_roll = rng.random()
    system = item.system
    if system is None:
        system = pick(rng, SYSTEMS) if rng.random() < 0.4 else ""
    messages: list[Any] = [recipe.SystemMessage(system)] if system else []
    if item.history is not None:
        messages += item.history
    else:
        for i, text in enumerate(item.turns):
            messages.append(recipe.AssistantMessage(text) if i % 2 else recipe.UserMessage(text))
    effort = "high" if effort_roll < 0.64 else "low" if effort_roll < 0.8 else "max"
    conversation = recipe.Conversation(
        messages,
        thinking_mode=thinking,
        tools=item.tools,
        reasoning_effort=effort,
        response_format="json_object" if item.json_mode else "text",
    )
    prompt = _ENCODER.render_conversation(conversation).prompt
    if thinking and effort_roll > 0.95:  # the engine also takes whole numbers 1..100
        number = str(rng.randint(1, 100))
        prompt = prompt.replace("Effort: 100 (", f"Effort: {number} (", 1)
    answer = (item.think.strip() + "</think>" if thinking else "") + _body(item.answer) + EOS
    key = f"{item.cls} {item.key or chr(10).join(item.turns)}"
    return Rendered(item.cls, prompt, answer, held_out(key) and not item.pinned, thinking, key)


def _body(answer: str) -> str:
    """The answer without outer newlines; a leading NUL marks a tool block that keeps its own."""
    return answer[1:] if answer.startswith("\x00") else answer.strip("\n")


def dsml_call(name: str, args: dict[str, tuple[bool, str]]) -> str:
    """One V4.1 tool call as the model writes it; args: name -> (is a string, text)."""
    lines = ["\n\n<｜DSML｜ calls>", f'<｜DSML｜ invoke name="{name}">']
    for key, (is_string, value) in args.items():
        flag = "true" if is_string else "false"
        lines.append(
            f'<｜DSML｜ parameter name="{key}" string="{flag}">{value}</｜DSML｜ parameter>'
        )
    if not args:
        lines.append("")
    return "\n".join([*lines, "</｜DSML｜ invoke>", "</｜DSML｜ calls>"])
