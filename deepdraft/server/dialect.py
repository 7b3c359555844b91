"""What the APIs beside chat completions share: they are read into a chat request, and their answers
are made of a chat answer's pieces.

Owns: `DialectJob`, the way of errors back to the fields that the client sent.
Knows nothing of: the fields of any one API, prompts, sockets.
"""

import re
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deepdraft.errors import RequestError
from deepdraft.server import schema
from deepdraft.server.chat import ChatChoice, ChatJob
from deepdraft.server.job import Job, Json
from deepdraft.types import TokenEvent

_MOST_IGNORED = 64
"""They are named in a header, which has its limits."""


@dataclass(slots=True, kw_only=True)
class AsChat:
    """A request of another API as a chat request, and where its parts came from."""

    chat: schema.ChatRequest
    places: list[str] = field(default_factory=list)
    """For each chat message the path of what the client sent."""
    tool_places: list[str] = field(default_factory=list)
    """For each tool likewise."""
    ignored: list[str] = field(default_factory=list)
    """Nested fields that have no effect, by path without indices."""

    def ignore(self, name: str) -> None:
        """Notes a nested field that has no effect."""
        if name not in self.ignored and len(self.ignored) < _MOST_IGNORED:
            self.ignored.append(name)


_INDEXED = re.compile(r"\b(messages|tools)\[(\d+)\](\.function\b)?")


@contextmanager
def errors_in_terms_of(
    read: AsChat, fields: Mapping[str, str], words: Mapping[str, str]
) -> Generator[None]:
    """Rewrites errors about a chat request.

    `fields` renames its top-level fields, `words` what a message calls calls and results.
    """

    def place(match: "re.Match[str]") -> str:
        places = read.places if match[1] == "messages" else read.tool_places
        index = int(match[2])
        return places[index] if index < len(places) else match[0]

    def path(param: str) -> str:
        if _INDEXED.match(param):
            return worded(_INDEXED.sub(place, param))
        for old, new in fields.items():
            if param == old or param.startswith((f"{old}.", f"{old}[")):
                return new + param[len(old) :]
        return param

    def worded(text: str) -> str:
        for old, new in words.items():
            text = text.replace(old, new)
        return text

    try:
        yield
    except RequestError as error:
        message, param = error.message, error.param
        if param is not None and message.startswith(param):
            message = path(param) + message[len(param) :]
        elif _INDEXED.match(message):
            message = _INDEXED.sub(place, message)
        message = worded(message)
        raise type(error)(message, param=None if param is None else path(param)) from error


class DialectJob(Job):
    """A chat job whose pieces are told as another API's events."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, chat: ChatJob, ignored: Sequence[str] = ()) -> None:
        """`chat`: a job of one choice."""
        super().__init__(
            chat.model,
            id=chat.id,
            name=chat.name,
            stream=chat.stream,
            include_usage=False,
            ignored=(*chat.ignored, *ignored),
            num_prompt=chat.num_prompt,
            requests=chat.requests,
            choices=chat.choices,
        )
        self.multi_turn = chat.multi_turn
        choice = self.choices[0]
        assert len(self.choices) == 1 and isinstance(choice, ChatChoice)
        self.choice: ChatChoice = choice

    def push(self, event: TokenEvent) -> list[Json]:
        """Takes an engine event; returns this API's events."""
        chunks = super().push(event)
        return [told for chunk in chunks for part in chunk["choices"] for told in self.tell(part)]

    @abstractmethod
    def tell(self, part: Json) -> list[Json]:
        """The events for one choice object of a chat stream."""


def final_arguments(choice: ChatChoice) -> list[str]:
    """The JSON arguments of each call; a repeated parameter once, with its last value."""
    message = choice.whole()["message"]
    return [call["function"]["arguments"] for call in message.get("tool_calls", ())]
