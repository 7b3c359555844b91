"""Lists, JSON answers, rewriting, personas and tool calls."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import deepseek_recipe as recipe

from . import tables as t
from .core import Item, dsml_call, pick, vary

KINDS = {
    "fruits": "apples|bananas|oranges|pears|grapes|cherries|plums|melons|kiwis|lemons",
    "vegetables": "carrots|potatoes|tomatoes|onions|peas|beans|spinach|cabbage|peppers|corn",
    "animals": "dogs|cats|horses|cows|lions|elephants|foxes|bears|rabbits|whales",
    "colors": "red|blue|green|yellow|orange|purple|black|white|brown|pink",
    "countries": "France|Germany|Japan|Brazil|Canada|Egypt|India|Norway|Kenya|Mexico",
    "cities": "Paris|London|Tokyo|New York|Cairo|Rome|Sydney|Berlin|Delhi|Lima",
    "programming languages": "Python|C|Java|JavaScript|Rust|Go|Ruby|Haskell|Lisp|Perl",
    "planets": "Mercury|Venus|Earth|Mars|Jupiter|Saturn|Uranus|Neptune",
    "sports": "football|tennis|swimming|running|cycling|skiing|golf|boxing|rowing|basketball",
    "instruments": "piano|guitar|violin|drums|flute|trumpet|cello|harp|clarinet|organ",
    "drinks": "water|tea|coffee|juice|milk|lemonade|cocoa|soda",
    "tools": "hammer|saw|screwdriver|drill|pliers|wrench|axe|file",
    "birds": "robin|eagle|owl|sparrow|duck|swan|crow|parrot",
    "trees": "oak|pine|birch|maple|beech|willow|palm|fir",
    "flowers": "rose|tulip|daisy|lily|violet|sunflower|orchid|poppy",
    "jobs": "teacher|nurse|baker|farmer|pilot|doctor|engineer|cook",
    "clothes": "shirt|trousers|hat|coat|socks|gloves|scarf|shoes",
    "vehicles": "car|bus|train|bicycle|ship|truck|airplane|tram",
    "board games": "chess|checkers|go|backgammon|ludo|dominoes",
    "sorting algorithms": "bubble sort|insertion sort|selection sort|merge sort|quicksort|heapsort",
    "data types": "integer|float|string|boolean|list|dictionary",
    "prime numbers": "2|3|5|7|11|13|17|19|23|29",
    "even numbers": "2|4|6|8|10|12|14|16|18|20",
    "odd numbers": "1|3|5|7|9|11|13|15|17|19",
}
COUNT = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


def _list(rng: random.Random) -> Item:
    kind = pick(rng, list(KINDS))
    names = KINDS[kind].split("|")
    n = rng.randint(2, min(8, len(names)))
    word = COUNT[n] if rng.random() < 0.6 else str(n)
    ask = pick(rng, ("List {n} {k}.", "Name {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}.", "Can you list {n} {k}?",
                     "I need a list of {n} {k}.", "Write a list of {n} {k}.", "Show me {n} examples of {k}."))  # fmt: skip
    answer = "\n".join(f"{i}. {name}" for i, name in enumerate(names[:n], 1))
    think = f"The user wants {COUNT[n]} {kind}. I count to {n}."
    return Item("lists", [vary(rng, ask.format(n=word, k=kind))], answer, think, key=f"{kind} {n}")


def _person(rng: random.Random) -> tuple[str, dict[str, object]]:
    name, age, city, job = (
        pick(rng, t.NAMES),
        rng.randint(5, 90),
        pick(rng, t.CITIES),
        pick(rng, t.JOBS),
    )
    article = "an" if job[0] in "aeiou" else "a"
    every = {"name": name, "age": age, "city": city, "job": job}
    chosen = [k for k in every if k == "name" or rng.random() < 0.6]
    if len(chosen) == 1:
        chosen.append(pick(rng, ("age", "city", "job")))
    said = {"age": f"is {age} years old", "city": f"lives in {city}", "job": f"is {article} {job}"}
    text = f"{name} " + " and ".join(said[k] for k in chosen if k != "name") + "."
    return text, {k: every[k] for k in chosen}


def _json(rng: random.Random) -> Item:
    text, data = _person(rng)
    ask = pick(rng, ("Answer as JSON: {t}", "Convert to JSON: {t}", "Write this as JSON: {t}", "{t} Give me that as JSON.",
                     "Extract the data as JSON: {t}", "Turn this into a JSON object: {t}", "{t} Answer in JSON."))  # fmt: skip
    think = "The fields are " + ", ".join(data) + "."
    return Item(
        "json",
        [ask.format(t=text)],
        json.dumps(data),
        think,
        key=text,
        json_mode=rng.random() < 0.3,
    )


def _json_list(rng: random.Random) -> Item:
    kind = pick(rng, list(KINDS))
    names = KINDS[kind].split("|")
    n = rng.randint(2, min(6, len(names)))
    ask = pick(
        rng,
        (
            "List {n} {k} as a JSON array.",
            "Give me {n} {k} as JSON.",
            "A JSON array of {n} {k}, please.",
        ),
    )
    if kind.endswith("numbers"):
        answer = json.dumps([int(x) for x in names[:n]])
    else:
        answer = json.dumps(names[:n])
    return Item(
        "json",
        [ask.format(n=COUNT[n], k=kind)],
        answer,
        f"{n} {kind} in an array.",
        key=f"json {kind} {n}",
    )


WORDS = (
    "house tree water light music garden winter summer letter river window flower stone bread apple table cloud happy "
    "green small world computer program story friend mountain silver orange paper island bridge planet"
).split()


def _rewrite(rng: random.Random) -> Item:
    kind = rng.randrange(8)
    words = rng.sample(WORDS, rng.randint(2, 5))
    name, city, food = pick(rng, t.NAMES), pick(rng, t.CITIES), pick(rng, t.FOODS)
    line = pick(rng, (f"{name} likes {food}.", f"{name} lives in {city}.", f"the {words[0]} is near the {words[1]}.",
                      f"{name} and {pick(rng, t.NAMES)} eat {food}.", f"I saw a {words[0]} in {city}."))  # fmt: skip
    if kind == 0:
        ask = pick(
            rng,
            ("Write in upper case: {x}", "Convert to upper case: {x}", "Make this upper case: {x}"),
        )
        return Item(
            "rewrite",
            [ask.format(x=line)],
            line.upper(),
            "Every letter becomes a capital.",
            key=line,
        )
    if kind == 1:
        ask = pick(
            rng,
            ("Write in lower case: {x}", "Convert to lower case: {x}", "Make this lower case: {x}"),
        )
        return Item(
            "rewrite", [ask.format(x=line)], line.lower(), "Every letter becomes small.", key=line
        )
    if kind == 2:
        ask = pick(
            rng, ("Repeat after me: {x}", "Say: {x}", "Repeat this: {x}", "Please repeat: {x}")
        )
        return Item("rewrite", [ask.format(x=line)], line, "I repeat the text.", key=line)
    if kind == 3:
        ask = pick(
            rng,
            (
                "Sort these words: {x}",
                "Put these words in alphabetical order: {x}",
                "Sort alphabetically: {x}",
            ),
        )
        answer = ", ".join(sorted(words))
        return Item(
            "rewrite",
            [ask.format(x=", ".join(words))],
            answer,
            "I sort by the first letters.",
            key=" ".join(words),
        )
    if kind == 4:
        ask = pick(
            rng,
            (
                "Make a sentence with the word {x}.",
                "Use the word {x} in a sentence.",
                "Write a sentence with {x}.",
            ),
        )
        answer = f"{name} wrote the word {words[0]} on a piece of paper."
        return Item(
            "rewrite",
            [ask.format(x=words[0])],
            answer.replace(name, "Anna"),
            f"I use {words[0]}.",
            key=words[0],
        )
    if kind == 5:
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 6))]
        ask = pick(rng, ("Sort these numbers: {x}", "Put in ascending order: {x}", "Sort: {x}"))
        shown = ", ".join(map(str, numbers))
        answer = ", ".join(map(str, sorted(numbers)))
        return Item(
            "rewrite", [ask.format(x=shown)], answer, f"The smallest is {min(numbers)}.", key=shown
        )
    if kind == 6:
        ask = pick(rng, ("How many words are in this list: {x}?", "Count these words: {x}"))
        n = len(words)
        return Item(
            "rewrite",
            [ask.format(x=", ".join(words))],
            f"There are {COUNT[n]} words.",
            f"I count {n} words.",
            key=" ".join(words),
        )
    ask = pick(rng, ("What is the first word of: {x}", "Tell me the first word: {x}"))
    return Item(
        "rewrite",
        [ask.format(x=" ".join(words))],
        words[0],
        "I take the first word.",
        key=" ".join(words),
    )


PERSONAS = (
    ("You are a pirate.", "Arr, matey! ", ""), ("You are a polite butler.", "Certainly. ", " Will that be all?"),
    ("You are a cheerful robot.", "Beep! ", " Boop!"), ("You are a friendly cat.", "Meow! ", ""),
    ("You are a wizard.", "By my beard! ", ""), ("You are a teacher.", "Good question! ", ""),
    ("End every answer with \"Have a nice day!\"", "", " Have a nice day!"),
    ("Start every answer with \"Sure!\"", "Sure! ", ""), ("Always answer with an exclamation mark.", "", "!"),
)  # fmt: skip


def _persona(rng: random.Random) -> Item:
    system, before, after = pick(rng, PERSONAS)
    roll = rng.random()
    if roll < 0.4:
        country, city = pick(rng, t.CAPITALS)
        ask, answer = f"What is the capital of {country}?", f"The capital of {country} is {city}."
    elif roll < 0.8:
        asks, fact = pick(rng, t.FACTS)
        ask, answer = pick(rng, asks.split("|")), fact + "."
    else:
        ask, answer = pick(rng, ("Hello!", "Hi", "Good morning")), "How can I help you today?"
    if after == "!":
        answer = answer.rstrip(".?")
    think = "I answer in the style that the system text asks for."
    return Item(
        "persona", [vary(rng, ask)], before + answer + after, think, system=system, key=system + ask
    )


def _tool(name: str, description: str, **fields: tuple[str, str]) -> recipe.ToolDefinition:
    properties = {k: {"type": kind, "description": what} for k, (kind, what) in fields.items()}
    schema = {"type": "object", "properties": properties, "required": list(fields)}
    return recipe.ToolDefinition(name, description, schema)


TOOLS = {
    "get_weather": _tool("get_weather", "Get the weather of a city.", city=("string", "Name of the city")),
    "get_time": _tool("get_time", "Get the current time in a city.", city=("string", "Name of the city")),
    "add": _tool("add", "Add two numbers.", a=("number", "First number"), b=("number", "Second number")),
    "search": _tool("search", "Search the web.", query=("string", "What to search for")),
    "send_message": _tool("send_message", "Send a message to a person.", to=("string", "Name"), text=("string", "Message text")),
    "set_timer": _tool("set_timer", "Set a timer.", minutes=("integer", "Minutes until it rings")),
}  # fmt: skip
SAID = (
    "I am on my way",
    "See you tomorrow",
    "Happy birthday",
    "Dinner is ready",
    "Thank you for your help",
    "I am late",
)


def _tool_call(rng: random.Random) -> Item:
    name = pick(rng, list(TOOLS))
    city, person, said = pick(rng, t.CITIES), pick(rng, t.NAMES), pick(rng, SAID)
    a, b, n = rng.randint(1, 999), rng.randint(1, 999), rng.randint(1, 60)
    thing = pick(
        rng,
        (
            f"{pick(rng, t.ANIMALS)}s",
            pick(rng, t.FOODS),
            f"hotels in {city}",
            f"how to learn {pick(rng, t.HOBBIES)}",
        ),
    )
    args: dict[str, tuple[bool, str]]
    if name in ("get_weather", "get_time"):
        what = "weather" if name == "get_weather" else "time"
        ask = pick(rng, ((f"What is the weather in {city}?", f"How is the weather in {city}?", f"Weather in {city}?") if what == "weather"
                         else (f"What time is it in {city}?", f"Tell me the time in {city}.", f"Time in {city}?")))  # fmt: skip
        args, result = (
            {"city": (True, city)},
            f"{rng.randint(5, 30)} degrees and sunny"
            if what == "weather"
            else f"{rng.randint(1, 12)}:{rng.randint(10, 59)}",
        )
        final = (
            f"The weather in {city}: {result}."
            if what == "weather"
            else f"It is {result} in {city}."
        )
    elif name == "add":
        ask = pick(
            rng, (f"What is {a} + {b}?", f"Add {a} and {b}.", f"Please compute {a} plus {b}.")
        )
        args, result = {"a": (False, str(a)), "b": (False, str(b))}, str(a + b)
        final = f"{a} + {b} = {a + b}"
    elif name == "search":
        ask = pick(
            rng,
            (
                f"Search for {thing}.",
                f"Look up {thing} on the web.",
                f"Find something about {thing}.",
            ),
        )
        args, result = {"query": (True, thing)}, f"Found three pages about {thing}."
        final = f"I found three pages about {thing}."
    elif name == "send_message":
        ask = pick(
            rng,
            (
                f"Tell {person}: {said}.",
                f'Send "{said}" to {person}.',
                f"Write {person} a message: {said}.",
            ),
        )
        args, result = {"to": (True, person), "text": (True, said)}, "sent"
        final = f"I sent the message to {person}."
    else:
        ask = pick(
            rng,
            (f"Set a timer for {n} minutes.", f"Wake me in {n} minutes.", f"Timer: {n} minutes."),
        )
        args, result = {"minutes": (False, str(n))}, "ok"
        final = f"The timer is set to {n} minutes."
    tools = [TOOLS[name]]
    if rng.random() < 0.35:
        tools.insert(rng.randrange(2), TOOLS[pick(rng, [x for x in TOOLS if x != name])])
    key = f"{name} {args}"
    think = f"I can use {name} for this."
    roll = rng.random()
    if roll < 0.1:
        return Item(
            "tools",
            ["Hello!"],
            "Hello! How can I help you today?",
            "The user greets me. No tool is needed.",
            tools=tools,
            pinned=True,
        )
    if roll < 0.6:
        return Item("tools", [ask], "\x00" + dsml_call(name, args), think, tools=tools, key=key)
    plain = {k: v if s else json.loads(v) for k, (s, v) in args.items()}
    history = [
        recipe.UserMessage(ask),
        recipe.AssistantMessage("", think, [recipe.ToolCall("call_1", name, json.dumps(plain))]),
        recipe.ToolMessage(result, "call_1"),
    ]
    return Item(
        "tools",
        [ask],
        final,
        "The tool has answered. I report the result.",
        tools=tools,
        history=history,
        key=key,
    )


def items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` lists, JSON answers, rewrites and personas."""
    makers = (_list, _list, _json, _json_list, _rewrite, _rewrite, _persona)
    for _ in range(count):
        yield pick(rng, makers)(rng)


def tool_items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` conversations with tools."""
    for _ in range(count):
        yield _tool_call(rng)
