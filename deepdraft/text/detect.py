"""Which prompt format a checkpoint's conversations have.

Owns: the choice, by the model's type, by telltale texts of its chat template (which is read and
never executed), and by its vocabulary. Knows nothing of: how a format is written.
"""

import json
import re
from pathlib import Path

from deepdraft.errors import CheckpointError
from deepdraft.text.control import DSML, EOT, THINK_END, THINK_START, USER
from deepdraft.text.conversation import TRAITS, Family
from deepdraft.text.tokenizer import Tokenizer

_MAX_BYTES = 16 << 20


def prompt_family(
    directory: Path, model_type: str, tokenizer: Tokenizer, wanted: str = "auto"
) -> Family:
    """The format of a checkpoint. `wanted`: its name, or "auto".

    Raises CheckpointError for a name that is not known or a template file that cannot be read.
    """
    for family in TRAITS:
        if family == wanted:
            return family
    if wanted != "auto":
        raise CheckpointError(f"chat format {wanted!r} is not one of auto, {', '.join(TRAITS)}")
    if model_type == "deepseek_v41":
        return "v4.1"
    if model_type == "deepseek_v4":
        return "v4"
    template = read_template(directory)
    found = template_family(template) if template else None
    return found or _by_vocabulary(model_type, tokenizer)


def template_family(template: str) -> Family | None:
    """The format that a chat template writes, by what only it has; None for another's."""
    if "### Instruction:" in template:
        return "coder"
    if USER in template:
        if DSML in template:
            return "v3.2"
        if THINK_END in template and re.search(r"\bthinking\b", template):
            return "v3.1"
        return "r1" if THINK_END in template or THINK_START in template else "v3"
    return "v2" if "User: " in template and "Assistant:" in template else None


def _by_vocabulary(model_type: str, tokenizer: Tokenizer) -> Family:
    thinks = tokenizer.id_of(THINK_START) is not None
    if model_type == "deepseek_v32":
        return "v3.2"
    if model_type == "deepseek_v3":
        return "v3.1" if thinks else "v3"
    if model_type == "llama":
        if tokenizer.id_of(EOT) is not None:
            return "coder"
        if thinks and tokenizer.id_of(USER) is not None:
            return "r1"
    return "v2"


def read_template(directory: Path) -> str | None:
    """The chat template beside a checkpoint: chat_template.jinja, or the one in
    tokenizer_config.json ("default" where there are several). Raises CheckpointError."""
    file = directory / "chat_template.jinja"
    try:
        if file.is_file():
            return _bounded(file).decode("utf-8", "replace")
        file = directory / "tokenizer_config.json"
        if not file.is_file():
            return None
        values = json.loads(_bounded(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    template = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict)]
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _bounded(file: Path) -> bytes:
    if file.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes; is it another file?")
    return file.read_bytes()
