"""Single-file web apps as chat answers: the page templates, their settings, the requests.

The canonical page of an app is always the same text; settings change only when the request asks
for it, so that an unchanged request has exactly one answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from .core import Item, pick, vary

FOLDER = Path(__file__).resolve().parent.parent / "apps"

LOOK = {"back": "#111", "ink": "#eee", "accent": "gray"}
DEFAULTS: dict[str, dict[str, str]] = {
    "tetris": {
        "title": "Tetris", "w": "200", "h": "400", "cols": "10", "rows": "20", "size": "20",
        "spawn": "3", "points": "100", "speed": "500",
    },
    "snake": {"title": "Snake", "color": "lime", "food": "red", "speed": "120"},
    "pong": {"title": "Pong", "color": "white", "ball": "5"},
    "breakout": {"title": "Breakout", "color": "white", "ball": "3"},
    "clock": {"title": "Clock"},
    "calculator": {"title": "Calculator"},
    "todo": {"title": "To-do list"},
    "stopwatch": {"title": "Stopwatch"},
    "counter": {"title": "Counter"},
    "memory": {"title": "Memory"},
    "guess": {"title": "Guess the number"},
    "tictactoe": {"title": "Tic-tac-toe"},
}  # fmt: skip
NAMES = {
    "tetris": ("tetris", "Tetris", "a Tetris", "the tetris", "Tetris (falling blocks)"),
    "snake": ("snake", "Snake", "a Snake", "the snake"),
    "pong": ("pong", "Pong", "a Pong", "the pong"),
    "breakout": ("breakout", "Breakout", "a Breakout", "a brick breaker", "the breakout"),
    "clock": ("clock", "a digital clock", "a clock"),
    "calculator": ("calculator", "a calculator", "a simple calculator"),
    "todo": ("to-do list", "a to-do list", "a todo list", "a todo", "a task list"),
    "stopwatch": ("stopwatch", "a stopwatch", "a simple stopwatch", "a timer with start and stop"),
    "counter": ("counter", "a counter", "a click counter"),
    "memory": ("memory", "a memory", "a memory card", "a card matching"),
    "guess": ("guess the number", "a number guessing", "a guess-the-number"),
    "tictactoe": (
        "tic-tac-toe",
        "a tic-tac-toe",
        "tic tac toe",
        "a tic tac toe",
        "noughts and crosses",
    ),
}
GAMES = ("tetris", "snake", "pong", "breakout", "memory", "guess", "tictactoe")
SMALL_APPS = ("clock", "counter", "guess", "todo", "stopwatch")  # two pages fit one row
PLAN = {
    "tetris": "canvas, seven pieces, moving, turning, clearing full rows, a score, game over",
    "snake": "canvas, a snake of cells, food, growing, walls, a score",
    "pong": "canvas, two paddles, a ball, a computer player, a score",
    "breakout": "canvas, a paddle, a ball, rows of bricks, a score",
    "clock": "a page that shows the time and updates every second",
    "calculator": "a display, a grid of buttons, one operation at a time",
    "todo": "an input, an add button, a list; click marks an item as done",
    "stopwatch": "a display, a start and stop button, a reset button",
    "counter": "a number and buttons that change it",
    "memory": "sixteen cards, pairs of letters, count the moves",
    "guess": "a secret number, an input, hints for too low and too high",
    "tictactoe": "nine cells, two players, eight winning lines",
}
COLORS = (
    "red", "blue", "green", "orange", "purple", "pink", "gold", "teal", "cyan", "navy", "maroon",
    "olive", "tomato", "crimson", "coral", "indigo", "lime", "silver", "brown", "salmon", "violet",
)  # fmt: skip
TITLES = (
    "Block Party", "My Game", "Falling Stars", "Night Shift", "Fun Time", "Arcade", "Super Blocks",
    "Little Garden", "Blue Moon", "Happy Hour", "Game Night", "Pixel World", "Sunny Day", "Retro",
    "Coffee Break", "Space Age", "Rainy Day", "Mini", "Quick Play", "Daily", "Big Fun", "Deep Sea",
)  # fmt: skip

THE_PROMPT = "implement the tetris game. output HTML code directly - no explanation."

DIRECT = (
    "Implement {g}. Output HTML code directly - no explanation.",
    "implement {g}. output html directly, no explanation",
    "Write {g} in a single HTML file. Output only the code.",
    "Write {g} as one HTML page. Only code, no explanation.",
    "Create {g} in HTML. Code only.",
    "Make {g} with HTML and JavaScript. Just the code, please.",
    "Build {g} as a single-file web page. Reply with the HTML only.",
    "Give me {g} in one HTML file, no comments, no explanation.",
    "Code {g} in HTML, CSS and JavaScript. Output the code directly.",
    "Please implement {g} in HTML. Output the code directly without explanation.",
    "I want {g} that runs in the browser. HTML only, no explanation.",
    "Output the HTML code of {g}. No explanation.",
    "{g} in html, code only",
    "Generate a complete HTML page with {g}. Do not explain anything.",
    "Show me the HTML source of {g}. Nothing else.",
    "Can you write {g} in HTML? Answer with the code only.",
    "html {g}, no explanation",
    "Program {g} in JavaScript inside one HTML file. Output HTML directly.",
    "Develop {g}. Output HTML directly. No explanations.",
    "Write the HTML code for {g}.",
    "Write {g}.",
    "Make {g}.",
    "Create {g}.",
    "Build {g}.",
    "Implement {g}.",
    "implement {g} in html",
    "Can you make {g}?",
    "Could you write {g} for me?",
    "I need {g}.",
    "Please code {g}.",
    "Write me {g} in HTML.",
    "write code for {g}",
)


HELD_OUT = (  # wordings that only the validation set uses
    "I would like {g} as one web page, please answer with HTML only.",
    "Put {g} into a single HTML document. Code without explanation.",
    "Could you program {g} for the browser? No text, just HTML.",
    "Produce the full HTML source for {g}.",
    "Design {g} with a canvas or plain elements, all in one file.",
    "My kid wants {g}. Send the HTML code.",
)


def page(app: str, **settings: str) -> str:
    """The HTML page of an app with the given settings."""
    text = (FOLDER / f"{app}.html").read_text(encoding="utf-8")
    for name, value in {**LOOK, **DEFAULTS[app], **settings}.items():
        text = text.replace(f"@{name}@", value)
    if "@" in text:
        raise ValueError(f"page {app}: a placeholder is left")
    return text


def _called(rng: random.Random, app: str) -> str:
    """A noun phrase for an app, with an article."""
    name = pick(rng, NAMES[app])
    if app in GAMES and rng.random() < 0.85:
        name += " game"
    if not name.startswith(("a ", "the ")) and rng.random() < 0.6:
        name = ("the " if rng.random() < 0.6 else "an " if name[0] in "aeiou" else "a ") + name
    return name


def _think(rng: random.Random, app: str, change: str = "") -> str:
    game = DEFAULTS[app]["title"]
    lines = f"The user wants {game} as one HTML page. Plan: {PLAN[app]}."
    if change:
        lines += f" Also {change}."
    return lines + " I will output only the code."


def _tetris_change(rng: random.Random) -> tuple[str, dict[str, str], str]:
    kind = rng.randrange(6)
    if kind == 0:
        ms, word = pick(rng, (("300", "faster"), ("800", "slower"), ("200", "very fast")))
        ask = pick(rng, ("Make it {}.", "It should be {}.", "The pieces should fall {}."))
        return ask.format(word), {"speed": ms}, f"fall every {ms} ms"
    if kind == 1:
        size = pick(rng, (16, 18, 24, 25, 30))
        new = {"size": str(size), "w": str(size * 10), "h": str(size * 20)}
        ask = pick(rng, ("Use cells of {} pixels.", "Each block should be {} pixels wide."))
        return ask.format(size), new, f"cells of {size} pixels"
    if kind == 2:
        cols, rows = pick(rng, ((8, 16), (12, 20), (12, 24), (10, 22), (8, 20), (14, 20)))
        new = {"cols": str(cols), "rows": str(rows), "w": str(cols * 20), "h": str(rows * 20)}
        new["spawn"] = str(cols // 2 - 2)
        ask = pick(rng, ("Use a board of {} by {}.", "The board is {} columns and {} rows."))
        return ask.format(cols, rows), new, f"a board of {cols} by {rows}"
    if kind == 3:
        points = pick(rng, ("10", "40", "50", "200", "500", "1000"))
        ask = pick(rng, ("Give {} points for each row.", "A cleared row is worth {} points."))
        return ask.format(points), {"points": points}, f"{points} points a row"
    return _look_change(rng)


def _look_change(rng: random.Random) -> tuple[str, dict[str, str], str]:
    kind = rng.randrange(3)
    if kind == 0:
        color = pick(rng, COLORS)
        ask = pick(
            rng, ("Use a {} border.", "The border should be {}.", "Make the accent color {}.")
        )
        return ask.format(color), {"accent": color}, f"accent color {color}"
    if kind == 1:
        back, ink, word = pick(
            rng,
            (("white", "black", "light"), ("black", "white", "dark"), ("navy", "white", "navy")),
        )
        ask = pick(
            rng, ("Use a {} background.", "Make the page {}.", "The background should be {}.")
        )
        return ask.format(word), {"back": back, "ink": ink}, f"a {word} background"
    title = pick(rng, TITLES)
    ask = pick(rng, ('Call it "{}".', "The title should be {}.", 'Use the title "{}".'))
    return ask.format(title), {"title": title}, f"title {title}"


def _changed(rng: random.Random, app: str) -> tuple[str, dict[str, str], str]:
    if app == "tetris":
        return _tetris_change(rng)
    if app == "snake" and rng.random() < 0.5:
        color = pick(rng, COLORS)
        ask = pick(rng, ("The snake should be {}.", "Use a {} snake.", "Draw the snake in {}."))
        return ask.format(color), {"color": color}, f"a {color} snake"
    if app == "pong" and rng.random() < 0.4:
        return "The ball should be fast.", {"ball": "8"}, "a fast ball"
    return _look_change(rng)


def request(rng: random.Random, app: str, asks: tuple[str, ...] = DIRECT) -> str:
    """A request for the canonical page."""
    return vary(rng, pick(rng, asks).format(g=_called(rng, app)))


def items(
    rng: random.Random, app: str, count: int, asks: tuple[str, ...] = DIRECT
) -> Iterator[Item]:
    """`count` conversations about one app."""
    cls = "tetris" if app == "tetris" else "apps"
    for _ in range(count):
        roll = rng.random()
        if app == "tetris" and roll < 0.2:
            ask = THE_PROMPT if roll < 0.16 else vary(rng, THE_PROMPT)
            yield Item(cls, [ask], page(app), _think(rng, app), pinned=True)
        elif roll < 0.66:
            yield Item(cls, [request(rng, app, asks)], page(app), _think(rng, app))
        elif roll < 0.9:
            ask, new, plan = _changed(rng, app)
            text = f"{request(rng, app, asks)} {ask}"
            key = f"{app} {sorted(new.items())}"
            yield Item(cls, [text], page(app, **new), _think(rng, app, plan), key=key)
        elif app in SMALL_APPS:
            ask, new, plan = _look_change(rng)
            turns = [request(rng, app, asks), page(app).rstrip("\n"), ask]
            yield Item(
                cls, turns, page(app, **new), f"Only one change: {plan}.", key=f"{app} {new}"
            )
        else:
            first = pick(rng, ("Hi!", "Hello", "Hey there", "Good morning"))
            reply = pick(rng, ("Hello! How can I help?", "Hi! What can I do for you?"))
            yield Item(cls, [first, reply, request(rng, app, asks)], page(app), _think(rng, app))
