"""Rules of a request that need no HTTP: messages, tools, formats.

Owns: the checks of a `Conversation` before it is rendered; docs/request-checks.md compares them
with the official service.
Knows nothing of: JSON bodies, models, tokenizers.
"""

from deepdraft.text.conversation import Conversation


def check_conversation(conversation: Conversation, *, images: bool = False) -> None:
    """Raise RequestError, with `param` naming the place, unless the conversation can be served.

    `images`: whether the model takes images.
    """
    raise NotImplementedError
