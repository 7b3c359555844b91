"""Short stories in simple English, built from plots with free slots."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations

import random
from collections.abc import Iterator

from . import tables as t
from .core import Item, pick, vary

ASK = (
    "Tell me a story about a {adj} {animal}.", "Tell me a story about a {animal}.", "Write a short story about a {animal}.",
    "Write a story about a {adj} {animal} named {name}.", "Tell me a story about a {animal} called {name}.",
    "Write a short story about {name} the {animal}.", "I want a story about a {animal} and a {thing}.",
    "Tell a story about a {animal} in a {place}.", "Write a bedtime story about a {adj} {animal}.",
    "Story about a {animal}, please.", "Can you tell me a story about a {animal}?", "Write a tiny story about a {animal} and a {thing}.",
    "Tell me a bedtime story about {name} the {adj} {animal}.", "Make up a story about a {animal} who finds a {thing}.",
)  # fmt: skip
FREE = (
    "Tell me a story.",
    "Write a short story.",
    "Tell me a bedtime story.",
    "A story, please.",
    "Can you tell me a story?",
)
OPEN = (
    "Once upon a time there was a {adj} {animal} named {name}.",
    "In a {place} there lived a {adj} {animal} called {name}.",
    "{name} was a {adj} {animal} who lived near a {place}.",
    "Long ago, a {adj} {animal} named {name} lived in a small house by the {place}.",
)
DAYS = (
    "One day",
    "One morning",
    "One sunny day",
    "One cold evening",
    "One rainy afternoon",
    "Early one morning",
)
PLOTS = (
    (
        "{day}, {name} found a {thing} in the {place}.", "\"Who lost this {thing}?\" asked {name}.",
        "{name} asked the {other}, but the {other} shook its head.", "Then {name} met a {friend} who was crying.",
        "\"I lost my {thing},\" said the {friend}.", "{name} gave the {thing} back, and the {friend} smiled.",
        "They shared some {food} and became good friends.",
    ),
    (
        "{day}, {name} wanted to see the {place}.", "The way was long, and it began to rain.",
        "{name} was afraid, but then a {friend} came along.", "\"Come with me,\" said the {friend}. \"I know the way.\"",
        "Together they walked under one big leaf.", "When they came to the {place}, the sun was shining.",
        "\"Thank you,\" said {name}. \"It is better to walk with a friend.\"",
    ),
    (
        "{name} loved {food} more than anything.", "{day}, all the {food} was gone.", "\"Who took it?\" asked {name}.",
        "There were small steps on the floor, and {name} followed them to the {place}.",
        "There sat a {friend} who was very hungry.", "\"I am sorry,\" said the {friend}. \"I had nothing to eat.\"",
        "{name} was not angry. From that day they always ate {food} together.",
    ),
    (
        "{name} had a {thing} and took it everywhere.", "{day}, the {thing} fell into the water.",
        "{name} could not swim and began to cry.", "A {friend} heard it and jumped into the water.",
        "Soon the {friend} came back with the {thing}.", "\"You are so brave,\" said {name}.",
        "\"Everyone is brave for a friend,\" said the {friend}.",
    ),
    (
        "All the other animals could sing, but {name} could not.", "{day}, {name} heard a voice in the {place}.",
        "It was a {friend} who was lost in the dark.", "{name} called as loud as it could.",
        "The {friend} followed the voice and was safe.", "\"Your voice is the best one,\" said the {friend}.",
        "Since then {name} sings every evening, and nobody laughs.",
    ),
    (
        "{day}, {name} planted a {adj2} seed in the {place}.", "Every day {name} gave it water and waited.",
        "The {friend} laughed and said, \"Nothing will grow there.\"", "But {name} did not give up.",
        "After many days a green leaf came out of the ground.", "It grew into a big tree full of {food2}.",
        "{name} gave the first ones to the {friend}, and they both laughed.",
    ),
    (
        "{day}, {name} saw a light far away behind the {place}.", "\"What can it be?\" thought {name}.",
        "It walked and walked until it met a {friend} with a lantern.", "\"I am looking for my way home,\" said the {friend}.",
        "{name} knew every path and showed the way.", "To say thank you, the {friend} gave {name} a {thing}.",
        "{name} kept the {thing} next to the bed for many years.",
    ),
    (
        "{day}, there was a big race in the {place}.", "{name} was slow, and the {other} laughed.",
        "But in the middle of the race a {friend} fell and hurt its leg.", "Everybody ran on, only {name} stopped to help.",
        "They came in last, but all the animals cheered.", "{name} got a {thing} as a prize for being kind.",
    ),
)  # fmt: skip
CLOSE = (
    "And they lived happily for a long time.", "That night {name} slept very well.", "It was the best day of the year.",
    "{name} went home with a happy heart.", "And that is the end of the story.", "The end.",
)  # fmt: skip
FRUIT = ("apples", "pears", "cherries", "plums", "nuts", "oranges")


def items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` requests for a story; the story obeys what the request names."""
    for _ in range(count):
        animal = pick(rng, t.ANIMALS)
        friend, other = rng.sample([a for a in t.ANIMALS if a != animal], 2)
        adj, adj2 = rng.sample([a for a in t.ADJECTIVES if a[0] not in "aeiou"], 2)
        slots = {
            "animal": animal, "friend": friend, "other": other, "adj": adj, "adj2": adj2, "name": pick(rng, t.NAMES),
            "thing": pick(rng, t.THINGS), "place": pick(rng, t.PLACES), "food": pick(rng, t.FOODS),
            "food2": pick(rng, FRUIT), "day": pick(rng, DAYS),
        }  # fmt: skip
        ask = pick(rng, ASK) if rng.random() < 0.93 else pick(rng, FREE)
        plots = (
            PLOTS if "{thing}" not in ask else [p for p in PLOTS if any("{thing}" in s for s in p)]
        )
        sentences = [pick(rng, OPEN), *pick(rng, plots), pick(rng, CLOSE)]
        story = " ".join(s.format(**slots) for s in sentences)
        for vowel_animal in ("owl", "elephant"):
            story = story.replace(f" a {vowel_animal}", f" an {vowel_animal}")
        text = ask.format(**slots)
        for vowel_animal in ("owl", "elephant"):
            text = text.replace(f" a {vowel_animal}", f" an {vowel_animal}")
        if "{name}" in ask:
            think = f"The story is about {slots['name']} the {animal}."
        else:
            think = f"The story is about a {animal}. I call it {slots['name']}."
        key = f"{animal} {slots['name']}" if "{name}" in ask else text
        free = ask in FREE
        yield Item("stories", [vary(rng, text)], story, think, key=key, pinned=free)
