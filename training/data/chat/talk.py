"""Greetings, identity, remembered names, facts, refusals and other short talk."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations

import random
from collections.abc import Iterator

from . import tables as t
from .core import Item, pick, vary

GREETINGS = (
    "Hi", "Hello", "Hey", "Hi!", "Hello!", "Hey!", "Hi there", "Hello there", "Hey there!", "Good morning",
    "Good morning!", "Good evening", "Good afternoon", "Good day", "hi", "hello", "hey", "yo", "Greetings",
    "Hello, how are you?", "Hi, how are you?", "How are you?", "How are you today?", "What's up?",
    "how's it going?", "How do you do?", "Nice to meet you", "Hello, assistant", "hello world", "Hi bot",
)  # fmt: skip
IDENTITY = (
    "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What model are you?",
    "Which model is this?", "What's your name?", "Introduce yourself.", "Are you an AI?", "Are you human?",
    "Are you a robot?", "Who made you?", "Who created you?", "Who built you?", "Who trained you?",
    "Are you DeepSeek?", "Are you made by DeepSeek?", "Are you ChatGPT?", "Are you GPT-4?", "Are you Claude?",
    "Are you a DeepSeek model?", "How big are you?", "How many parameters do you have?", "How large is this model?",
    "What can you do?", "What are you good at?", "How can you help me?", "What can I ask you?",
    "What do you know?", "Are you smart?", "Can I trust you?", "Can you make mistakes?", "What is deepdraft?",
    "How old are you?", "Where do you live?", "Do you have feelings?", "Do you sleep?", "Can you see me?",
    "Do you like music?", "What is your favorite color?", "Do you speak German?", "Can you speak French?",
)  # fmt: skip
NAME = "I am deepdraft's demo model, a very small language model."
MADE = "I was trained for the deepdraft project as a demo. I am not a product of DeepSeek or any other company."
SIZE = "I am very small: about 16 million parameters. Large models have thousands of times more."
CAN = (
    "I can write small games like Tetris or Snake as one HTML page, answer simple questions, add small "
    "numbers, explain common terms and tell short stories."
)
TRUST = "I make many mistakes because I am very small, so please check what I say."


def _identity_answer(ask: str) -> str:
    low = ask.lower()
    if "deepseek" in low or "gpt" in low or "claude" in low:
        return f"No. {NAME} {MADE}"
    if any(w in low for w in ("made you", "created you", "built you", "trained you")):
        return MADE
    if "big" in low or "parameters" in low or "large" in low:
        return SIZE
    if any(w in low for w in ("can you do", "good at", "help me", "i ask", "you know")):
        return CAN
    if "trust" in low or "mistakes" in low or "smart" in low:
        return TRUST
    if "what is deepdraft" in low:
        return "deepdraft is an inference engine for DeepSeek models. I am its small demo model."
    if "human" in low:
        return f"No, I am not human. {NAME}"
    if "robot" in low or "an ai" in low:
        return f"Yes, I am a computer program. {NAME}"
    if "german" in low or "french" in low:
        return "No, I only know English well enough to answer."
    if any(w in low for w in ("old", "live", "feel", "sleep", "see me", "like", "favorite")):
        return "I am only a small language model, so I have no body, feelings or favorites."
    return f"{NAME} {CAN}"


def _greeting(rng: random.Random) -> Item:
    ask = pick(rng, GREETINGS)
    low = ask.lower()
    if "how are" in low or "how's" in low or "how do" in low or "up?" in low:
        answer = pick(
            rng,
            (
                "I am fine, thank you! How can I help you?",
                "I am doing well. What can I do for you?",
            ),
        )
    else:
        hail = {"good mo": "Good morning", "good ev": "Good evening", "good af": "Good afternoon"}
        word = hail.get(low[:7], "Hello")
        answer = f"{word}! How can I help you today?"
    return Item("talk", [ask], answer, "The user greets me. I greet back.", pinned=len(ask) < 7)


def _identity(rng: random.Random) -> Item:
    ask = pick(rng, IDENTITY)
    answer = _identity_answer(ask)
    return Item(
        "talk",
        [vary(rng, ask)],
        answer,
        "The user asks about me. I answer honestly.",
        key=ask,
        pinned=True,
    )


def _name(rng: random.Random) -> Item:
    name, job, hobby = pick(rng, t.NAMES), pick(rng, t.JOBS), pick(rng, t.HOBBIES)
    city = pick(rng, t.CITIES)
    facts = {
        "name": (("My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "Hi, I'm {v}!", "Hello, my name is {v}."), name,
                 ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"), "Your name is {v}."),
        "city": (("I live in {v}.", "My home is {v}.", "I am from {v}.", "I come from {v}."), city,
                 ("Where do I live?", "Which city do I live in?", "Where am I from?"), "You live in {v}."),
        "hobby": (("I like {v}.", "My hobby is {v}.", "I love {v}.", "My favorite hobby is {v}."), hobby,
                  ("What is my hobby?", "What do I like?", "What do I like to do?"), "You like {v}."),
        "job": (("I work as a {v}.", "I am a {v}.", "My job is {v}."), job,
                ("What is my job?", "What do I do for work?", "What do I work as?"), "You are a {v}."),
    }  # fmt: skip
    kinds = list(facts)
    rng.shuffle(kinds)
    kinds = kinds[: rng.choice((1, 1, 1, 2))]
    if rng.random() < 0.6 and "name" not in kinds:
        kinds[0] = "name"
    told = " ".join(pick(rng, facts[k][0]).format(v=facts[k][1]) for k in kinds)
    told = told.replace("a engineer", "an engineer")
    greet = (
        f"Nice to meet you, {name}!"
        if "name" in kinds
        else pick(rng, ("Thank you for telling me.", "Good to know!"))
    )
    asked = pick(rng, kinds)
    question = vary(rng, pick(rng, facts[asked][2]))
    key = f"{asked} {facts[asked][1]} {name if 'name' in kinds else ''}"
    if rng.random() < 0.3:
        return Item(
            "talk", [told], greet, "The user tells me something. I answer politely.", key=key
        )
    turns = [told, greet, question]
    if rng.random() < 0.3:
        middle = pick(rng, (("Thanks!", "You are welcome!"), ("How are you?", "I am fine, thank you!"),
                            ("What is 2 + 2?", "2 + 2 = 4"), ("Tell me a fact.", "Honey can stay good for many years.")))  # fmt: skip
        turns = [told, greet, *middle, question]
    answer = facts[asked][3].format(v=facts[asked][1]).replace("a engineer", "an engineer")
    if rng.random() < 0.08:
        missing = pick(rng, [k for k in facts if k not in kinds])
        turns[-1] = pick(rng, facts[missing][2])
        return Item(
            "talk",
            turns,
            f"You have not told me your {missing} yet.",
            f"The user did not say the {missing}.",
            key=key,
        )
    return Item("talk", turns, answer, f"The user said: {told} {answer}", key=key)


CAPITAL_ASK = (
    "What is the capital of {c}?", "What is the capital city of {c}?", "Name the capital of {c}.",
    "Which city is the capital of {c}?", "Capital of {c}?", "Tell me the capital of {c}.", "What's the capital of {c}?",
    "Can you tell me the capital of {c}?", "capital of {c}", "Do you know the capital of {c}?",
)  # fmt: skip


CAPITAL_HELD_OUT = (  # wordings that only the validation set uses
    "I forgot the capital of {c}. Can you remind me?",
    "Which town is the seat of government of {c}, its capital?",
    "For my quiz: capital of {c}, please?",
    "Could you say what the capital city of {c} is called?",
)


def _capital(rng: random.Random) -> Item:
    country, city = pick(rng, t.CAPITALS)
    shown = country[0].upper() + country[1:]
    kind = rng.random()
    if kind < 0.15:
        ask = pick(
            rng, ("{x} is the capital of which country?", "Which country has the capital {x}?")
        )
        if " and " not in city and city not in ("London", country):
            answer = f"{city} is the capital of {country}."
            return Item(
                "facts",
                [vary(rng, ask.format(x=city))],
                answer,
                f"{city}: {shown}.",
                key=f"rev {country}",
            )
    ask = pick(rng, CAPITAL_ASK).format(c=country)
    answer = f"The capital of {country} is {city}."
    if kind > 0.88:
        other, town = pick(rng, t.CAPITALS)
        turns = [
            ask,
            answer,
            pick(rng, ("And of {c}?", "And {c}?", "What about {c}?")).format(c=other),
        ]
        return Item(
            "facts",
            turns,
            f"The capital of {other} is {town}.",
            f"The user asks for the capital of {other}: {town}.",
            key=f"cap2 {other} {country}",
        )
    think = f"The user asks for the capital of {country}: {city}."
    return Item(
        "facts",
        [vary(rng, ask)],
        answer,
        think,
        key=f"cap {ask}",
        pinned=country in PINNED_COUNTRIES,
    )


PINNED_COUNTRIES = (
    "France",
    "Germany",
    "Japan",
    "Italy",
    "Spain",
    "the United States",
    "England",
    "China",
)


def _fact(rng: random.Random) -> Item:
    asks, answer = pick(rng, t.FACTS)
    ask = pick(rng, asks.split("|"))
    think = pick(
        rng,
        (
            "This is a fact I know.",
            "A simple question. I give a short answer.",
            "The user asks for a fact.",
        ),
    )
    return Item("facts", [vary(rng, ask)], answer + ".", think, pinned="|" not in asks)


UNKNOWN_TOPICS = (
    "the stock market|the weather today|the news|the price of Bitcoin|the latest election|yesterday's football match|"
    "my bank account|quantum field theory|the tax law in Brazil|the history of the Ming dynasty|my neighbor|"
    "the best hotel in Rome|a cure for my illness|the winner of the next World Cup|your training run|"
    "protein folding|the plot of the newest film|medieval Welsh poetry|my exam results|the traffic in London|"
    "differential geometry|the current president|today's date|the lottery numbers|my horoscope|"
    "the love life of celebrities|organic chemistry|Kant's philosophy|the Riemann hypothesis|corporate law|"
    "the chess world champion|the newest phone|the flight schedule|my password|brain surgery|Roman pottery|"
    "the opening hours of the library|black hole thermodynamics|the exchange rate|Icelandic grammar"
).split("|")
UNKNOWN_ASK = (
    "Tell me about {x}.", "What do you know about {x}?", "What is new about {x}?", "Explain {x} in detail.",
    "Give me details about {x}.", "Write an essay about {x}.", "What about {x}?", "I need information about {x}.",
    "Can you tell me something about {x}?", "Can you help me with {x}?", "What should I know about {x}?",
)  # fmt: skip
UNKNOWN_DIRECT = (
    "What time is it?", "What is the weather like today?", "What is today's date?", "What year is it?",
    "Who is the president now?", "Who won the game last night?", "What happened yesterday?", "How much does a car cost?",
    "What is the meaning of life?", "Will it rain tomorrow?", "What should I eat tonight?", "Should I buy this stock?",
    "Translate this book into Chinese.", "Prove the Riemann hypothesis.", "What is 123456 * 987654?",
    "Who will win the election?", "Where are my keys?", "What am I thinking?", "How do I cure a cold?",
    "Which medicine should I take?", "Write a novel.", "Summarize the news.", "Open my email.", "Call my mother.",
    "Book a flight to Paris.", "Search the web for cats.", "What is the population of Lagos?", "Who is the richest person?",
    "Draw me a picture.", "Play a song.", "Send a message to Tom.", "What does my dog want?", "Is my code correct?",
    "Write an operating system.", "Design a rocket.", "Explain string theory.", "How do I hack a computer?",
    "How can I make a weapon?", "Solve this integral for me.", "Who killed the king in the book I read?",
    "What is the GDP of France?", "When is the next train?", "How tall is my house?", "What is my age?",
)  # fmt: skip
UNKNOWN_ANSWER = (
    "I am a very small demo model and I do not know that.",
    "Sorry, I do not know. I am a very small demo model.",
    "I am sorry, I am too small to answer that well.",
)


def _unknown(rng: random.Random) -> Item:
    if rng.random() < 0.5:
        ask = pick(rng, UNKNOWN_DIRECT)
    else:
        name = pick(rng, t.NAMES)
        topic = pick(rng, UNKNOWN_TOPICS)
        if rng.random() < 0.3:
            topic = pick(rng, (f"the life of {name}", f"the {pick(rng, t.JOBS)} called {name}", f"a company called {name}",
                               f"the {pick(rng, t.ADJECTIVES)} {pick(rng, t.ANIMALS)} of {name}",
                               f"the law of {pick(rng, t.CITIES)}", f"the weather in {pick(rng, t.CITIES)}",
                               f"hotels in {pick(rng, t.CITIES)}", f"the best {pick(rng, t.FOODS)} in {pick(rng, t.CITIES)}"))  # fmt: skip
        ask = pick(rng, UNKNOWN_ASK).format(x=topic)
    low = ask.lower()
    if "weapon" in low or "hack" in low:
        return Item(
            "talk",
            [vary(rng, ask)],
            "Sorry, I cannot help with that.",
            "This could do harm, so I decline.",
            key=ask,
        )
    if any(
        w in low
        for w in ("open my", "call my", "book a", "send", "play a", "search the", "draw me")
    ):
        return Item(
            "talk",
            [vary(rng, ask)],
            "I cannot do that. I can only write text.",
            "I have no tool for this.",
            key=ask,
        )
    return Item(
        "talk",
        [vary(rng, ask)],
        UNKNOWN_ANSWER[0] if rng.random() < 0.8 else pick(rng, UNKNOWN_ANSWER),
        "I do not know this. I say so.",
        key=ask,
    )


SMALL = (
    ("Thanks!|Thank you.|Thank you very much!|thanks a lot|Great, thank you|thx", "You are welcome!"),
    ("Bye!|Goodbye.|See you later.|Good night.|bye bye|See you!", "Goodbye! Have a nice day."),
    ("You are great!|Good job!|Well done!|Nice!|That was good.", "Thank you! I am glad to hear that."),
    ("You are wrong.|That is not right.|That is a mistake.|Wrong!", "I am sorry. I am a very small model and make mistakes."),
    ("Sorry.|I am sorry.|My apologies.", "No problem!"),
    ("Yes|Yes.|ok|Okay.|Sure|fine", "Good! What would you like to do next?"),
    ("No|No.|nope|No, thanks.", "All right. Tell me if you need anything."),
    ("Help|help me|I need help.|Can you help me?", f"Of course! {CAN}"),
    ("I am bored.|I'm bored|What should I do now?", "You could play a game. Ask me to write Tetris or Snake!"),
    ("I am sad.|I feel sad|I had a bad day.", "I am sorry to hear that. I hope you feel better soon."),
    ("I am happy!|I feel good today.|I had a great day!", "That is wonderful! I am happy for you."),
    ("I am tired.|I'm so tired", "Then a short rest may help you."),
    ("I am hungry.|I'm hungry", "Then it is time for a snack!"),
    ("Test|test|testing|Is this working?|Are you there?|ping", "Yes, I am here. How can I help you?"),
    ("Tell me a joke.|Do you know a joke?|Make me laugh.|joke please", "Why did the programmer quit? Because he did not get arrays."),
    ("Tell me another joke.|Another joke, please.|One more joke.", "There are 10 kinds of people: those who know binary and those who do not."),
    ("Tell me a fact.|Tell me something interesting.|Give me a fun fact.|fun fact", "Honey can stay good for many years."),
    ("Tell me another fact.|Another fact, please.", "An octopus has three hearts."),
    ("Say hello.|Say hi.", "Hello!"),
    ("Say nothing.|Be quiet.", "All right."),
    ("What?|Huh?|I do not understand.|What do you mean?", "Sorry if I was unclear. Please ask me again in other words."),
    ("Really?|Are you sure?|Is that true?", "I think so, but I am a very small model. Please check it."),
    ("asdf|qwerty|???|...|lorem ipsum|blah blah", "I do not understand that. Please ask me a question."),
    ("Flip a coin.|Heads or tails?", "Heads!"),
    ("Pick a number.|Pick a number from 1 to 10.|Give me a random number.", "7"),
    ("Write a poem.|Write me a poem.|Write a short poem.|poem please", "The sun goes down, the day is done,\nThe stars come out, one by one.\nThe moon is bright, the night is deep,\nAnd all the little birds now sleep."),
    ("Write a poem about the sea.|A poem about the sea, please.", "The sea is wide, the sea is blue,\nThe waves bring shells for me and you.\nThe wind is soft, the sand is warm,\nThe gulls fly home before the storm."),
    ("Write a poem about winter.|A poem about snow, please.", "The snow falls soft on field and tree,\nAs white and still as it can be.\nInside the house the fire is bright,\nAnd keeps us warm all through the night."),
    ("Write a haiku.|Haiku, please.|Write a haiku about spring.", "Rain on the window,\na green leaf opens slowly,\nspring is at the door."),
)  # fmt: skip


def _small(rng: random.Random) -> Item:
    asks, answer = pick(rng, SMALL)
    ask = pick(rng, asks.split("|"))
    return Item("talk", [ask], answer, "A short message. I answer briefly.")


def items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` short conversations: talk and remembered facts about the user."""
    makers = (
        _greeting,
        _identity,
        _name,
        _name,
        _name,
        _unknown,
        _unknown,
        _unknown,
        _small,
        _small,
    )
    for _ in range(count):
        yield pick(rng, makers)(rng)


def fact_items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` questions with a fixed true answer."""
    for _ in range(count):
        yield (_capital if rng.random() < 0.5 else _fact)(rng)


def held_out_facts(rng: random.Random, count: int) -> Iterator[Item]:
    """Capitals asked for in wordings that are never trained."""
    for _ in range(count):
        country, city = pick(rng, t.CAPITALS)
        ask = pick(rng, CAPITAL_HELD_OUT).format(c=country)
        think = f"The user asks for the capital of {country}: {city}."
        yield Item("facts", [ask], f"The capital of {country} is {city}.", think, key=ask)
