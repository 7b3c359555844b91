"""Sums, comparisons and unit conversions with short worked traces."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations

import random
from collections.abc import Iterator

from .core import Item, pick, vary

CONVERSIONS = (
    ("kilometers", "meters", 1000), ("meters", "centimeters", 100), ("hours", "minutes", 60),
    ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7), ("kilograms", "grams", 1000),
    ("liters", "milliliters", 1000), ("years", "months", 12), ("feet", "inches", 12), ("dozens", "pieces", 12),
    ("centimeters", "millimeters", 10), ("tons", "kilograms", 1000), ("bytes", "bits", 8),
    ("kilobytes", "bytes", 1000), ("yards", "feet", 3), ("gallons", "quarts", 4),
)  # fmt: skip
ADD = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "Add {a} and {b}.",
    "Calculate {a} + {b}.", "How much is {a} + {b}?", "Compute {a} plus {b}.", "What's {a} + {b}?",
    "Can you add {a} and {b}?", "what is the sum of {a} and {b}?",
)  # fmt: skip
SUB = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "Subtract {b} from {a}.",
    "Calculate {a} - {b}.", "How much is {a} - {b}?", "What's {a} minus {b}?",
)  # fmt: skip
MUL = (
    "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a} x {b}", "Multiply {a} by {b}.",
    "Calculate {a} * {b}.", "How much is {a} times {b}?", "What's {a} x {b}?",
)  # fmt: skip


def _addition(rng: random.Random) -> Item:
    top = pick(rng, (10, 10, 20, 50, 100, 100))
    a, b = rng.randint(0, top), rng.randint(0, top)
    total = a + b
    tens, ones = a + b // 10 * 10, b % 10
    if b >= 10 and ones:
        think = f"{a} + {b}: {a} + {b - ones} = {tens}, {tens} + {ones} = {total}."
    else:
        think = f"{a} + {b} = {total}."
    text = pick(rng, ADD).format(a=a, b=b)
    return Item("sums", [text], f"{a} + {b} = {total}", think, key=f"{a}+{b}")


def _subtraction(rng: random.Random) -> Item:
    top = pick(rng, (10, 20, 50, 100))
    a, b = sorted((rng.randint(0, top), rng.randint(0, top)), reverse=True)
    ones = b % 10
    if b >= 10 and ones:
        think = f"{a} - {b}: {a} - {b - ones} = {a - b + ones}, {a - b + ones} - {ones} = {a - b}."
    else:
        think = f"{a} - {b} = {a - b}."
    text = pick(rng, SUB).format(a=a, b=b)
    return Item("sums", [text], f"{a} - {b} = {a - b}", think, key=f"{a}-{b}")


def _product(rng: random.Random) -> Item:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    text = pick(rng, MUL).format(a=a, b=b)
    return Item(
        "sums", [text], f"{a} * {b} = {a * b}", f"{a} times {b} is {a * b}.", key=f"{a}*{b}"
    )


def _conversion(rng: random.Random) -> Item:
    big, small, factor = pick(rng, CONVERSIONS)
    n = rng.randint(2, 20)
    ask = pick(
        rng,
        (
            "How many {s} are {n} {b}?", "Convert {n} {b} to {s}.", "{n} {b} in {s}?",
            "What is {n} {b} in {s}?", "How many {s} are in {n} {b}?",
        ),
    )  # fmt: skip
    singular = {"feet": "foot", "pieces": "piece"}.get(big, big[:-1])
    think = f"One {singular} is {factor} {small}. {n} * {factor} = {n * factor}."
    answer = f"{n} {big} are {n * factor} {small}."
    return Item("sums", [ask.format(n=n, b=big, s=small)], answer, think, key=f"{n} {big}")


def _compare(rng: random.Random) -> Item:
    a, b = rng.randint(1, 100), rng.randint(1, 100)
    if a == b:
        b += 1
    larger = rng.random() < 0.6
    ask = pick(rng, ("Which number is {w}, {a} or {b}?", "Which is {w}: {a} or {b}?"))
    word = "larger" if larger else "smaller"
    best = max(a, b) if larger else min(a, b)
    sign = ">" if a > b else "<"
    answer = f"{best} is {word}."
    return Item("sums", [ask.format(w=word, a=a, b=b)], answer, f"{a} {sign} {b}.", key=f"{a}?{b}")


def _parity(rng: random.Random) -> Item:
    n = rng.randint(0, 200)
    ask = pick(rng, ("Is {n} even or odd?", "Is {n} an even number?", "Is the number {n} odd?"))
    even = n % 2 == 0
    word = "even" if even else "odd"
    think = f"The last digit is {n % 10}, so {n} is {word}."
    if "or" in ask:
        answer = f"{n} is {word}."
    else:
        yes = even == ("even" in ask)
        answer = f"{'Yes' if yes else 'No'}, {n} is {word}."
    return Item("sums", [ask.format(n=n)], answer, think, key=f"parity {n}")


def _count(rng: random.Random) -> Item:
    start = rng.randint(1, 20)
    n = rng.randint(3, 12)
    ask = pick(
        rng,
        (
            "Count from {a} to {b}.",
            "Count up from {a} to {b}.",
            "List the numbers from {a} to {b}.",
        ),
    )
    answer = ", ".join(str(i) for i in range(start, start + n)) + "."
    think = f"I start at {start} and stop at {start + n - 1}."
    text = ask.format(a=start, b=start + n - 1)
    return Item("sums", [text], answer, think, key=f"count {start} {n}")


def _follow_up(rng: random.Random) -> Item:
    a, b, c = rng.randint(1, 30), rng.randint(1, 30), rng.randint(1, 10)
    first = pick(rng, ADD).format(a=a, b=b)
    second = pick(rng, ("And plus {c}?", "Now add {c}.", "Add {c} more.", "Plus {c}?")).format(c=c)
    s = a + b
    think = f"The result was {s}. {s} + {c} = {s + c}."
    return Item("sums", [first, f"{a} + {b} = {s}", second], f"{s} + {c} = {s + c}", think)


def items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` arithmetic conversations."""
    makers = (_addition, _addition, _addition, _subtraction, _product, _conversion, _compare)
    makers += (_parity, _count, _follow_up)
    for _ in range(count):
        item = pick(rng, makers)(rng)
        item.turns[-1] = vary(rng, item.turns[-1])
        yield item
