"""What a body says an answer must look like, as one grammar.

Owns: which fields ask for a form, how forms, tools and reasoning go together, and what is refused.
Knows nothing of: how grammars are written or compiled, prompts, sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from deepdraft.engine.grammar import (
    CALL_MARKER,
    Grammar,
    GrammarCompiler,
    GrammarSource,
    Start,
    compiler_for,
)
from deepdraft.engine.lark import (
    CallSyntax,
    CallTool,
    MarkSyntax,
    Rules,
    calls_rule,
    choice_rule,
    json_rule,
    quote,
    regex_rule,
)
from deepdraft.errors import RequestError
from deepdraft.server import schema
from deepdraft.server.sampling import ModelView
from deepdraft.text import prompt as text
from deepdraft.text.control import CALL_MARKS
from deepdraft.text.conversation import TRAITS, TextPart

_BLOCK_GAP = "\n\n"
"""What stands between reasoning and calls."""
_BLOCK_START = "/\\n{0,2}</"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of the content: `write` adds its rule and gives the rule's name."""

    where: str
    write: Callable[[Rules], str]
    optional: bool = False
    """Where it cannot be enforced, any JSON is enforced instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """The grammar of an answer, if it has one, and the fields that it leaves out."""

    grammar: Grammar | None = None
    ignored: tuple[str, ...] = ()
    form: bool = False
    """The content has a form, so nothing needs to be cut off it."""


def completion_enforcement(body: schema.SamplingFields, model: ModelView) -> Enforcement:
    """What plain text must look like. Raises RequestError."""
    form = read_form(body)
    if form is None:
        return Enforcement()
    _check_ends(body, form.where)
    return _enforce_form(_compiler(model), form, "at_once")


def chat_enforcement(
    body: schema.ChatRequest,
    conversation: text.Conversation,
    start: text.ParseStart,
    model: ModelView,
) -> Enforcement:
    """What a chat answer must look like. `start`: where the answer begins. Raises RequestError."""
    form, offered = read_form(body), _offered(conversation)
    forced = bool(offered) and conversation.tool_choice.mode in ("required", "function")
    one_call = body.parallel_tool_calls is False or conversation.tool_choice.mode == "function"
    strict = any(tool.strict for _, tool in offered)
    if form is None and not (offered and (forced or one_call or strict)):
        return Enforcement()
    at: Start = "after_reasoning" if start.stage.startswith("reasoning") else "at_once"
    compiler = _compiler(model)
    if not offered:
        assert form is not None
        _check_ends(body, form.where)
        return _enforce_form(compiler, form, at, prefix=_prefix(conversation, start))
    syntax = _call_syntax(model)
    tools, ignored = _check_tools(compiler, syntax, offered, forced=forced)

    def calls(rules: Rules) -> str:
        return calls_rule(rules, syntax, tools, many=not one_call)

    rules = Rules()
    if forced:
        _check_ends(body, "tool_choice")
        lark = calls(rules)
        if not start.in_tool_calls:
            gap = f"{quote(_BLOCK_GAP + '<')} " if isinstance(syntax, CallSyntax) else ""
            lark = f"{gap}{syntax.opening()} {lark}"
        grammar = _compile(compiler, rules.text(lark), at, "tool_choice")
    elif form is None:
        # Free text until the call marker, then calls as they must be.
        if isinstance(syntax, MarkSyntax):
            grammar = _compile(compiler, rules.text(calls(rules)), "at_marked_call", "tools")
        else:
            lark = f"{syntax.rest_of_opening()} {calls(rules)}"
            grammar = _compile(compiler, rules.text(lark), "at_call", "tools")
    else:
        _check_ends(body, form.where)

        def instead(rules: Rules) -> str:
            dsml = isinstance(syntax, CallSyntax)
            gap = f"{rules.terminal(_BLOCK_START)} " if dsml else ""
            return f"{gap}{syntax.opening()} {calls(rules)}"

        enforced = _enforce_form(compiler, form, at, instead=instead)
        grammar, ignored = enforced.grammar, ignored + enforced.ignored
    return Enforcement(grammar=grammar, ignored=ignored, form=form is not None and not forced)


def _call_syntax(model: ModelView) -> CallSyntax | MarkSyntax:
    """How the family writes calls. A prompt with tools stands already, so its tokens are there."""
    dsml = TRAITS[model.family].calls == "dsml"
    marks = (CALL_MARKER,) if dsml else CALL_MARKS
    ids = [i for i in map(model.tokenizer.id_of, marks) if i is not None]
    assert len(ids) == len(marks), "a chat tokenizer has the marks of calls"
    if dsml:
        return CallSyntax(marker_id=ids[0], family=model.family)
    return MarkSyntax(mark_ids=tuple(ids), fenced=model.family != "v3.1")


def _compiler(model: ModelView) -> GrammarCompiler:
    return compiler_for(model.tokenizer, model.vocab_size, model.eos_token_id, model.more_end_ids)


def _check_ends(body: schema.SamplingFields, where: str) -> None:
    if body.ignore_eos:
        raise RequestError(
            f"ignore_eos cannot be combined with {where}: the answer ends where it is complete",
            param="ignore_eos",
        )


def _prefix(conversation: text.Conversation, start: text.ParseStart) -> str:
    """The content that the prompt begins, and that counts as a part of the form."""
    if start.stage != "content_continuation":
        return ""
    content = conversation.messages[-1].content
    if isinstance(content, tuple):
        return "\n\n".join(p.text for p in content if isinstance(p, TextPart))
    return content or ""


def _compile(
    compiler: GrammarCompiler, lark: str, start: Start, where: str, prefix: str = ""
) -> Grammar:
    try:
        return compiler.compile(GrammarSource(lark=lark, start=start, prefix=prefix))
    except RequestError as error:
        raise _at(where, error) from error


def _at(where: str, error: RequestError) -> RequestError:
    return RequestError(f"{where} cannot be enforced: {error.message}", param=where)


# Forms


def _enforce_form(
    compiler: GrammarCompiler,
    form: Form,
    start: Start,
    *,
    prefix: str = "",
    instead: Callable[[Rules], str] | None = None,
) -> Enforcement:
    """Compiles a form; `instead` writes what is allowed in its place."""

    def compile_with(write: Callable[[Rules], str]) -> Grammar:
        rules = Rules()
        try:
            lark = write(rules)
        except RequestError as error:
            raise _at(form.where, error) from error
        if instead is not None:
            lark = f"{lark} | {instead(rules)}"
        return _compile(compiler, rules.text(lark), start, form.where, prefix)

    try:
        return Enforcement(grammar=compile_with(form.write), form=True)
    except RequestError:
        if not form.optional:
            raise
    grammar = compile_with(lambda rules: json_rule(rules, {}))
    return Enforcement(grammar=grammar, form=True, ignored=(form.where,))


def read_form(body: schema.SamplingFields) -> Form | None:
    """The form that a body asks of the content, by whichever field. Raises RequestError."""
    forms = [*_response_format(body.response_format)]
    if body.guided_json is not None:
        forms.append(_json_form(body.guided_json, "guided_json"))
    if body.guided_regex is not None:
        forms.append(_regex_form(body.guided_regex, "guided_regex"))
    if body.guided_choice is not None:
        forms.append(_choice_form(body.guided_choice, "guided_choice"))
    forms += _structured_outputs(body.structured_outputs)
    if len(forms) > 1:
        raise RequestError(
            f"{forms[0].where} and {forms[1].where} both ask for a form; send one of them",
            param=forms[1].where,
        )
    return forms[0] if forms else None


def _response_format(form: schema.AnyFormat | None) -> list[Form]:
    if isinstance(form, schema.JsonObjectFormat):
        return [_json_form({"type": "object"}, "response_format")]
    if isinstance(form, schema.RegexFormat):
        return [_regex_form(form.regex, "response_format.regex")]
    if isinstance(form, schema.JsonSchemaFormat):
        where = "response_format.json_schema.schema"
        loose = form.json_schema.strict is False
        return [_json_form(form.json_schema.schema, where, optional=loose)]
    return []


def _structured_outputs(fields: schema.StructuredOutputs | None) -> list[Form]:
    where = "structured_outputs"
    if fields is None:
        return []
    for name in ("grammar", "structural_tag", "whitespace_pattern"):
        if getattr(fields, name) is not None:
            raise RequestError(
                f"{where}.{name} is refused; use json, regex, choice or json_object",
                param=f"{where}.{name}",
            )
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(fields, name):
            raise RequestError(
                f"{where}.{name} is refused; write it into the schema or leave it out",
                param=f"{where}.{name}",
            )
    forms = []
    if fields.json is not None:
        forms.append(_json_form(fields.json, f"{where}.json"))
    if fields.regex is not None:
        forms.append(_regex_form(fields.regex, f"{where}.regex"))
    if fields.choice is not None:
        forms.append(_choice_form(fields.choice, f"{where}.choice"))
    if fields.json_object:
        forms.append(_json_form({"type": "object"}, f"{where}.json_object"))
    return forms


def _json_form(value: Any, where: str, *, optional: bool = False) -> Form:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON: {error}", param=where) from error
    return Form(where=where, write=lambda rules: json_rule(rules, value), optional=optional)


def _regex_form(pattern: str, where: str) -> Form:
    return Form(where=where, write=lambda rules: regex_rule(rules, pattern))


def _choice_form(choices: list[str], where: str) -> Form:
    return Form(where=where, write=lambda rules: choice_rule(rules, choices))


# Tools


def _offered(conversation: text.Conversation) -> list[tuple[int, text.Tool]]:
    """The tools that may be called, with their places in the request."""
    choice = conversation.tool_choice
    if choice.mode == "none" or conversation.task is not None:
        return []
    tools = list(enumerate(conversation.tools))
    return [(i, t) for i, t in tools if choice.mode != "function" or t.name == choice.name]


def _check_tools(
    compiler: GrammarCompiler,
    syntax: CallSyntax | MarkSyntax,
    offered: Sequence[tuple[int, text.Tool]],
    *,
    forced: bool,
) -> tuple[list[CallTool], tuple[str, ...]]:
    """The tools as they are enforced, and the fields that are not.

    A strict tool is enforced or refused. Of the others, a call that is forced follows the schema
    where that can be enforced, and any other call is only well-formed.
    """
    tools, ignored = [], set[str]()
    for index, tool in offered:
        where = f"tools[{index}].function.parameters"
        try:
            parameters = text.tool_parameters(tool)
            checked = CallTool(
                name=tool.name, parameters=parameters, enforced=bool(tool.strict) or forced
            )
            rules = Rules()
            compiler.compile(
                GrammarSource(lark=rules.text(calls_rule(rules, syntax, [checked], many=False)))
            )
        except RequestError as error:
            if tool.strict:
                raise _at(where, error) from error
            checked = CallTool(name=tool.name, parameters=None, enforced=False)
            ignored.add("tools.function.parameters")
        tools.append(checked)
    return tools, tuple(sorted(ignored))
