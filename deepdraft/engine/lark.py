"""Grammar text in the library's Lark dialect: forms of an answer, and tool calls.

Owns: how a schema, a pattern, a list of choices and the call syntax of each family are written as
rules (docs/structured-output.md).
Knows nothing of: tokenizers (but for the ids of call marks), masks, HTTP.

Rules are made so that two neighbouring terminals never compete for the same text: the library's
lexer is greedy. So a string's terminal ends with the `</` of the tag behind it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from deepdraft.engine.json_schema import Schema, clean, resolve, standalone
from deepdraft.errors import RequestError
from deepdraft.text.calls import read_tag, tag_end
from deepdraft.text.conversation import Family

MAX_PATTERN = 8192
MAX_CHOICES = 4096
MAX_CHOICE_BYTES = 64 << 10

# No escape that could spell a character in two ways: a property's name would have an alias that
# the grammar takes for another name. White space is bounded, or a model may write it for ever.
_STRINGS = {"json_allowed_escapes": 'nrbtf\\"'}
_LOOSE = {**_STRINGS, "whitespace_pattern": "[ \\t]{1,4}|\\r?\\n[ \\t]{0,80}"}
_TIGHT = {
    **_STRINGS,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}

_ANNOTATIONS = frozenset(
    """title description default examples example deprecated readOnly writeOnly $comment $schema
    $defs definitions""".split()
)
_NOT_STRINGS = {"type": ["number", "boolean", "null", "array", "object"]}


class Rules:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def rule(self, body: str) -> str:
        """Adds a rule; returns its name."""
        return self._add("r", body)

    def terminal(self, body: str) -> str:
        """Adds a terminal: one regular language, matched as a whole. Returns its name."""
        return self._add("T", body)

    def _add(self, letter: str, body: str) -> str:
        name = f"{letter}{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def text(self, start: str) -> str:
        """The grammar whose answers are those of the rule body `start`."""
        # Without this option the library would forbid every spelling of a forced text but one, and
        # would look ahead through forced text of any length.
        head = '%llguidance {"no_forcing": true}'
        return "\n".join([head, f"start: {start}", *self._lines]) + "\n"


def quote(text: str) -> str:
    """A literal."""
    return json.dumps(text)


def json_rule(rules: Rules, schema: object, *, tight: bool = False) -> str:
    """JSON that `schema` allows. `tight`: on one line, with at most a space after `,` and `:`.

    Raises RequestError for a schema that is too large or refused by us; the library's own refusals
    come when the grammar is compiled.
    """
    return _json(rules, clean(schema), tight=tight)


def _json(rules: Rules, cleaned: Schema, *, tight: bool) -> str:
    if isinstance(cleaned, bool):
        cleaned = {} if cleaned else {"enum": []}
    options = _TIGHT if tight else _LOOSE
    return rules.rule("%json " + json.dumps({"x-guidance": options, **cleaned}))


def regex_rule(rules: Rules, pattern: str) -> str:
    """Text that `pattern` matches from end to end. `\\d` and `\\w` mean ASCII, as in JSON schemas.

    Raises RequestError.
    """
    if not pattern or len(pattern) > MAX_PATTERN:
        raise RequestError(f"a pattern has 1 to {MAX_PATTERN} characters, this one {len(pattern)}")
    _check_unicode(pattern, "the pattern")
    # The whole answer must match, so anchors at the ends say nothing new.
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    if _ends_in_escape(body):
        body = pattern  # the dollar was escaped
    if _ends_in_escape(body):
        raise RequestError("the pattern ends in a backslash that escapes nothing")
    return rules.rule(f"/{llguidance.regex_to_lark(body, use_ascii='dw')}/" if body else '""')


def _ends_in_escape(pattern: str) -> bool:
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def choice_rule(rules: Rules, choices: Sequence[str]) -> str:
    """One of some texts. Raises RequestError."""
    if not choices or len(choices) > MAX_CHOICES:
        raise RequestError(f"give 1 to {MAX_CHOICES} choices, not {len(choices)}")
    for text in choices:
        _check_unicode(text, "a choice")
    size = sum(len(text.encode()) for text in choices)
    if size > MAX_CHOICE_BYTES:
        raise RequestError(f"the choices have {size} bytes together; at most {MAX_CHOICE_BYTES} go")
    texts = [quote(text) for text in dict.fromkeys(choices) if text]
    options = [rules.terminal(" | ".join(texts))] if texts else []
    # No terminal may be empty.
    return rules.rule(" | ".join([*options, '""'] if "" in choices else options))


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} holds a lone surrogate, which is not Unicode") from error


# Tool calls


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a family writes calls: the id of its DSML marker, and its block's name."""

    marker_id: int
    family: Family

    @property
    def marker(self) -> str:
        """The marker as a grammar symbol."""
        return f"<[{self.marker_id}]>"

    @property
    def space(self) -> str:
        """What stands between the marker and a tag's name."""
        return " " if self.family == "v4.1" else ""

    @property
    def block(self) -> str:
        """Name of the tag around all calls."""
        return {"v4.1": "calls", "v3.2": "function_calls"}.get(self.family, "tool_calls")

    def tag(self, text: str, *, closing: bool = False) -> str:
        """A tag up to the end of `text`, as grammar symbols."""
        return f"{quote('</' if closing else '<')} {self.after_marker(text)}"

    def after_marker(self, text: str) -> str:
        """Marker and `text` of a tag."""
        return f"{self.marker} {quote(self.space + text)}"

    def opening(self) -> str:
        """The block's opening tag from its marker on."""
        return f"{self.marker} {self.rest_of_opening()}"

    def rest_of_opening(self) -> str:
        """The block's opening tag behind its marker."""
        return quote(f"{self.space}{self.block}>\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSyntax:
    """How V3, R1 and V3.1 write calls: ids of the marks, and whether arguments are fenced JSON
    behind the word "function"."""

    mark_ids: tuple[int, ...]
    """In the order of `text.control.CALL_MARKS`."""
    fenced: bool

    def opening(self) -> str:
        """The block's opening mark."""
        return f"<[{self.mark_ids[0]}]>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTool:
    """A tool that may be called. `enforced`: its arguments follow `parameters`."""

    name: str
    parameters: Mapping[str, Any] | None
    enforced: bool = True


def calls_rule(
    rules: Rules, syntax: CallSyntax | MarkSyntax, tools: Sequence[CallTool], *, many: bool
) -> str:
    """The calls of a block, from behind its opening tag to the end of its closing tag.

    `many`: one call or more, else one. Raises RequestError where the arguments of a tool cannot be
    enforced.
    """
    if isinstance(syntax, MarkSyntax):
        return _marked_calls(rules, syntax, tools, many=many)
    bodies = [_tool(rules, syntax, tool) for tool in tools]
    head = syntax.tag('invoke name="')
    call = rules.rule(f"{head} ({' | '.join(bodies)}) {syntax.tag('invoke>', closing=True)} {_NL}")
    end = syntax.tag(f"{syntax.block}>", closing=True)
    return rules.rule(f"{call}{'+' if many else ''} {end}")


def _marked_calls(
    rules: Rules, syntax: MarkSyntax, tools: Sequence[CallTool], *, many: bool
) -> str:
    _, begin, sep, end, done = (f"<[{number}]>" for number in syntax.mark_ids)
    options = []
    for tool in tools:
        _check_unicode(tool.name, "the name of a tool")
        arguments = json_rule(rules, _object(tool), tight=True)
        if syntax.fenced:
            head = quote(f"{tool.name}\n```json\n")
            options.append(rules.rule(f"{head} {arguments} {quote(_FENCE_END)}"))
        else:
            options.append(rules.rule(f"{quote(tool.name)} {sep} {arguments}"))
    body = f"({' | '.join(options)})"
    if syntax.fenced:
        body = f"{quote('function')} {sep} {body}"
    call = rules.rule(f"{begin} {body} {end}")
    more = f"({_NL} {call})*" if syntax.fenced else f"{call}*"
    return rules.rule(f"{call} {more if many else ''} {done}")


def _object(tool: CallTool) -> Mapping[str, Any]:
    """The schema of a call's arguments, which are an object."""
    if not tool.enforced:
        return {"type": "object"}
    schema = dict(tool.parameters or {"properties": {}, "additionalProperties": False})
    if schema.setdefault("type", "object") != "object":
        raise RequestError("the parameters of a function are an object")
    return schema


_FENCE_END = "\n```"
_NL = quote("\n")


def _tool(rules: Rules, syntax: CallSyntax, tool: CallTool) -> str:
    # V4.1 leaves an empty line in a call without arguments.
    nothing = quote("\n") if syntax.family == "v4.1" else '""'
    head = quote(f'{tool.name}">\n')
    if not tool.enforced:
        arguments = f"({_any_parameter(rules, syntax, ())}+ | {nothing})"
    elif tool.parameters is None:
        arguments = nothing
    else:
        parts, needed = _arguments(rules, syntax, tool.parameters)
        body = rules.rule(" ".join(parts)) if parts else '""'
        arguments = body if needed else f"({body} | {nothing})" if parts else nothing
    return rules.rule(f"{head} {arguments}")


_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties"}


def _arguments(
    rules: Rules, syntax: CallSyntax, parameters: Mapping[str, Any]
) -> tuple[list[str], bool]:
    """The parameters in the order of the schema, and whether one of them is required."""
    root = clean(parameters)
    schema = root
    for _ in range(8):
        if isinstance(schema, bool) or set(schema) - _ANNOTATIONS != {"$ref"}:
            break
        schema = resolve(root, schema["$ref"])
    if isinstance(schema, bool):
        raise RequestError("the parameters of a function are an object")
    unknown = sorted(set(schema) - _ANNOTATIONS - _OBJECT_KEYS)
    if unknown:
        raise RequestError(f"{', '.join(unknown)} cannot be enforced for the arguments of a call")
    if schema.get("type", "object") != "object":
        raise RequestError("the parameters of a function are an object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    # An empty list of properties is how a function without parameters is written.
    more = schema.get("additionalProperties", None if "properties" in schema else {})
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise RequestError("properties must be an object and required a list")
    properties = dict(properties)
    for name in required:
        if not isinstance(name, str):
            raise RequestError("required must be a list of names")
        properties.setdefault(name, schema.get("additionalProperties", {}))
    parts = []
    for name, value in properties.items():
        if value is False and name not in required:
            continue
        part = _parameter(rules, syntax, name, value, root)
        parts.append(part if name in required else f"{part}?")
    if more is not None and more is not False:
        parts.append(f"{_any_parameter(rules, syntax, tuple(properties), more, root)}*")
    return parts, bool(required)


def _parameter(rules: Rules, syntax: CallSyntax, name: str, schema: Schema, root: Schema) -> str:
    tag = f' parameter name="{name}" string="true"'
    read = read_tag(tag, closing=False)
    if tag_end(tag + ">") != len(tag) or (read.name, read.string) != (name, True):
        raise RequestError(f"a parameter cannot have the name {name!r} in a call")
    _check_unicode(name, "the name of a parameter")
    return _values(rules, syntax, schema, root, lambda string: quote(f'{name}" string="{string}">'))


def _any_parameter(
    rules: Rules,
    syntax: CallSyntax,
    taken: tuple[str, ...],
    schema: Schema = True,
    root: Schema = True,
) -> str:
    """A parameter of any name that is not among `taken`."""
    name = '/[^"<>=\\s]{1,64}/'
    if taken:
        name = f"{name} & ~({' | '.join(map(quote, taken))})"

    def head(string: str) -> str:
        return rules.terminal(f"({name}) " + quote(f'" string="{string}">'))

    return _values(rules, syntax, schema, root, head)


def _values(rules: Rules, syntax: CallSyntax, schema: Schema, root: Schema, head: Any) -> str:
    raw, others = _split(schema, root)
    options = []
    if raw is not None:
        options.append(f"{head('true')} {rules.terminal(raw)}")
    if others is not None:
        value = _json(rules, standalone(others, root), tight=True)
        options.append(f"{head('false')} {value} {quote('</')}")
    open_tag = syntax.tag('parameter name="')
    return rules.rule(
        f"{open_tag} ({' | '.join(options)}) {syntax.after_marker('parameter>')} {_NL}"
    )


_RAW = "/(?s:.*)<\\//"


def _split(schema: Schema, root: Schema, depth: int = 0) -> tuple[str | None, Schema | None]:
    """A parameter's strings as they stand in a call (a terminal), and all its other values.

    Strings whose schema cannot be read off at a glance are written as JSON with the others: that is
    valid in a call, and just as strictly enforced.
    """
    if schema is True:
        return _RAW, _NOT_STRINGS
    if schema is False:
        return None, False
    keys = set(schema) - _ANNOTATIONS
    kinds = schema.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    if not keys:
        return _RAW, _NOT_STRINGS
    if keys == {"$ref"} and depth < 8:
        return _split(resolve(root, schema["$ref"]), root, depth + 1)
    if keys in ({"enum"}, {"const"}, {"enum", "type"}, {"const", "type"}):
        return _split_values(schema, kinds)
    if "type" in keys and "string" not in kinds:
        return None, schema
    if "string" in kinds and keys <= {"type", "minLength", "maxLength"}:
        return _split_text(schema, kinds)
    if keys == {"anyOf"} and isinstance(schema["anyOf"], list) and depth < 8:
        parts = [_split(option, root, depth + 1) for option in schema["anyOf"]]
        texts = [raw for raw, _ in parts if raw is not None]
        others = [other for _, other in parts if other is not None]
        raw = " | ".join(f"({text})" for text in texts) if texts else None
        if not others:
            return raw, None
        return raw, others[0] if len(others) == 1 else {"anyOf": others}
    return None, schema


def _split_values(schema: Mapping[str, Any], kinds: set[str]) -> tuple[str | None, Schema | None]:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list):
        return None, schema
    texts = [v for v in values if isinstance(v, str)]
    others = [v for v in values if not isinstance(v, str)]
    if kinds and "string" not in kinds:
        texts = []
    if not texts:
        return None, schema
    raw = f"({' | '.join(map(quote, dict.fromkeys(texts)))}) {quote('</')}"
    rest = sorted(kinds - {"string"})
    if not others or (kinds and not rest):
        return raw, None
    return raw, {"enum": others, **({"type": rest} if kinds else {})}


def _split_text(schema: Mapping[str, Any], kinds: set[str]) -> tuple[str | None, Schema | None]:
    rest: Schema | None = {"type": sorted(kinds - {"string"})} if len(kinds) > 1 else None
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(low, int) or not isinstance(high, int | None) or low < 0:
        return None, schema
    if high is None and not low:
        return _RAW, rest
    if max(low, high or 0) > 100_000 or (high is not None and high < low):
        return None, schema
    return f"/(?s:.{{{low},{'' if high is None else high}}})<\\//", rest
