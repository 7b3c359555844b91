"""Text to token ids and back.

Owns: `Tokenizer` over a `tokenizer.json`, the decoder for streams, the Engram compression map.
Knows nothing of: prompts, models. Token ids are never assumed; tokens are found by their string.
"""

import codecs
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from deepdraft.errors import CheckpointError, PromptTooLong, RequestError

_FILE_NAME = "tokenizer.json"
_MAX_FILE_BYTES = 256 << 20
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A byte-level BPE tokenizer.

    Every entry of the file's `added_tokens` is a control token here, whether the file calls it
    special or not: DeepSeek's role and think marks are not `special` in the published file.
    """

    def __init__(self, spec: dict[str, Any], where: str) -> None:
        """Build from the parsed `tokenizer.json`; `where` names it in errors."""
        _check_spec(spec, where)
        try:
            self._full = tokenizers.Tokenizer.from_str(json.dumps(spec))
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{where} is not a usable tokenizer: {error}.") from error
        for encoder in (self._full, self._plain):
            encoder.no_truncation()
            encoder.no_padding()
        self._ids: dict[str, int] = self._full.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise CheckpointError(f"{where} has no tokens.")
        for token in spec["added_tokens"]:
            # The library gives its own ids where those of the file do not follow its vocabulary.
            if self._ids.get(token["content"]) != token["id"]:
                raise CheckpointError(
                    f"{where}: added token {token['content']!r} has id {token['id']} in the file, "
                    f"but the vocabulary puts it at {self._ids.get(token['content'])}."
                )
        self.vocab_size: int = max(self._ids.values()) + 1
        """One more than the highest token id."""
        self.control_ids: frozenset[int] = frozenset(t["id"] for t in spec["added_tokens"])
        self._bytes = _byte_table(self._ids, self.vocab_size)
        self._longest = _longest_token(spec, self._bytes)
        self._strings: list[str | None] = [None] * self.vocab_size
        for string, token_id in self._ids.items():
            self._strings[token_id] = string
        self._whole: dict[int, str | None] = {}
        self._check_plain_encoder(where)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read `tokenizer.json`; `path` is the file or its directory. Raises CheckpointError."""
        path = Path(path)
        file = path / _FILE_NAME if path.is_dir() else path
        try:
            size = file.stat().st_size
            if size > _MAX_FILE_BYTES:
                raise CheckpointError(
                    f"{file} has {size} bytes; a tokenizer has at most {_MAX_FILE_BYTES}. "
                    "Is it another file?"
                )
            if not file.is_file():  # a pipe would be waited for
                raise CheckpointError(f"{file} is not a plain file; put the tokenizer there.")
            spec = json.loads(file.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{file} is missing. A checkpoint directory needs its {_FILE_NAME}; "
                "download it again."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{file} is not JSON ({error}). The file is truncated or corrupt; "
                "download it again."
            ) from error
        return cls(spec, str(file))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text: no control token, whatever the text spells. No BOS is added."""
        return self._encode(self._plain, text)

    def encode_with_control(self, text: str) -> list[int]:
        """Ids of text in which the spelling of a control token becomes that token."""
        return self._encode(self._full, text)

    def check_fits(self, text: str, max_tokens: int, *, before: int = 0, param: str) -> None:
        """Raises PromptTooLong where `before` tokens and the text surely exceed `max_tokens`.

        Judged by the text's length alone: encoding megabytes takes seconds, which a text that
        cannot fit is not worth.
        """
        fewest = before + (-(-len(text) // self._longest) if self._longest else 0)
        if fewest > max_tokens:
            raise PromptTooLong(
                f"the prompt has at least {fewest} tokens; this model's context is {max_tokens} "
                "tokens for prompt and answer together: shorten the prompt",
                param=param,
            )

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Text of `ids`, control tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """Id of the token with exactly this string, or None."""
        return self._ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes, possibly a part of a character, that a token stands for.

        Ids without a token (a padded vocabulary) stand for nothing.
        """
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that holds whole characters only; None for one that does not."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self.vocab_size:
            self._whole[token_id] = text
        return text

    def token_string(self, token_id: int) -> str | None:
        """The token's string in the vocabulary file (byte-level alphabet), or None."""
        return self._strings[token_id] if 0 <= token_id < self.vocab_size else None

    def incremental(self) -> "IncrementalDecoder":
        """A decoder for one stream of ids."""
        return IncrementalDecoder(self)

    def _encode(self, encoder: tokenizers.Tokenizer, text: str) -> list[int]:
        if not text:
            return []
        try:
            # The batch call lets other threads run meanwhile, and leaves out the offsets.
            return encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "The text holds a lone surrogate, which is not Unicode text. Send well-formed text."
            ) from error
        except BaseException as error:
            # A pattern that gives up panics in the library, which is no Exception in Python.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                "The tokenizer gave up on the text, which has too long a run of the same kind of "
                f"character: {error}. Shorten or split that run."
            ) from error

    def _check_plain_encoder(self, where: str) -> None:
        """Refuse a file whose merges alone can make a control token."""
        for token_id in self.control_ids:
            string = self._strings[token_id]
            if string and not self.control_ids.isdisjoint(self.encode_text(string)):
                raise CheckpointError(
                    f"{where}: plain text that spells the control token {string} would become that "
                    "token (its model section has a merge or an ignore_merges entry for it), so "
                    "users could forge turns. This tokenizer is refused."
                )


class IncrementalDecoder:
    """Turns a stream of ids into text; holds back a character until its last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert isinstance(decoder, codecs.BufferedIncrementalDecoder)
        self._utf8 = decoder

    def push(self, token_id: int) -> str:
        """Text that became complete with this token, maybe empty."""
        if not self._utf8.buffer:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the stream. An incomplete character is dropped, so this returns the empty string."""
        self._utf8.reset()
        return ""


def _longest_token(spec: dict[str, Any], table: list[bytes]) -> int | None:
    """The most bytes of text that one token can stand for; None where that has no bound, as a
    normaliser or a token that takes the blanks around it may shorten text."""
    if spec.get("normalizer") is not None:
        return None
    if any(t.get("lstrip") or t.get("rstrip") for t in spec["added_tokens"]):
        return None
    return max(map(len, table))


def engram_token_map(tokenizer: Tokenizer) -> list[int]:
    """Map [vocab_size] from token id to its compressed id of the Engram tables.

    Tokens whose text is equal after normalisation share a compressed id (architecture notes 5.1).
    The number of compressed ids is the maximum plus one.
    """
    compressed: dict[str, int] = {}
    token_map = []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        if _REPLACEMENT in text:
            key = tokenizer.token_string(token_id) or text
        else:
            key = _normalise(text) or text
        token_map.append(compressed.setdefault(key, len(compressed)))
    return token_map


# The library's normalisers, not unicodedata: the published tables were made with them, and the two
# differ (its accents are all combining marks; its white space leaves out U+001C..U+001F).
_FOLD = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
    ]
)
_STRIP = normalizers.Strip()


def _normalise(text: str) -> str:
    text = _FOLD.normalize_str(text)
    return text if text == " " else _STRIP.normalize_str(text)


def _check_spec(spec: object, where: str) -> None:
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise CheckpointError(f"{where} has no `model` section; it is not a tokenizer.json.")
    if spec["model"].get("type") != "BPE" or not isinstance(spec["model"].get("vocab"), dict):
        raise CheckpointError(
            f"{where}: model.type is {spec['model'].get('type')!r}; only BPE with a vocabulary is "
            "supported."
        )
    decoder = spec.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise CheckpointError(
            f"{where}: decoder.type must be ByteLevel, as in all DeepSeek tokenizers; found "
            f"{decoder.get('type') if isinstance(decoder, dict) else decoder!r}."
        )
    added = spec.setdefault("added_tokens", [])
    if not isinstance(added, list) or not all(
        isinstance(t, dict) and isinstance(t.get("id"), int) and isinstance(t.get("content"), str)
        for t in added
    ):
        raise CheckpointError(f"{where}: added_tokens must be a list of {{id, content, ...}}.")


def _byte_alphabet() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable Latin-1 stands for itself, the rest is moved
    to the code points from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    return alphabet | {chr(256 + i): b for i, b in enumerate(moved)}


def _byte_table(ids: dict[str, int], size: int) -> list[bytes]:
    """Bytes of each id. A string outside the alphabet (control tokens) stands for its UTF-8."""
    alphabet = _byte_alphabet()
    table = [b""] * size
    for string, token_id in ids.items():
        try:
            table[token_id] = bytes([alphabet[c] for c in string])
        except KeyError:
            table[token_id] = string.encode()
    return table
