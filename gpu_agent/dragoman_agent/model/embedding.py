"""How a model's files want texts embedded: the prompts that go before them. What the files ask for and is not done is refused.

Read from the layout that sentence-transformers saves (modules.json, the pooling's config.json,
config_sentence_transformers.json) and from a GGUF file's `pooling_type`. Vectors are always the last token's hidden state
after the final norm, scaled to Euclidean norm 1.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import MAX_JSON_BYTES, read_json
from dragoman_agent.model.json_object import JsonObject
from dragoman_agent.model.metadata import Metadata

MODULES_NAME: Final = "modules.json"
PROMPTS_NAME: Final = "config_sentence_transformers.json"
LIMITS_NAME: Final = "sentence_bert_config.json"
QUERY: Final = "query"
# As Qwen3-Embedding's model card writes a query (arXiv 2506.05176, section 2).
QWEN3_INSTRUCTION: Final = "Instruct: {}\nQuery:"
_INSTRUCTED: Final = re.compile(r"Instruct: .*\n(Query: ?)", re.DOTALL)
_LAST: Final = "lasttoken"
_GGUF_POOLING: Final = ("none", "mean", "cls", "last", "rank")
_GGUF_LAST: Final = (0, 3)
_DO: Final = "use a model that takes the last token's vector, such as Qwen3-Embedding"


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """What goes before a text. `instruction_form` has `{}` where the task of a query goes, None where none is known."""

    is_declared: bool = False  # the files say that the model embeds
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name
    default_prompt: str | None = None  # the name of what goes before a text that asks for none
    instruction_form: str | None = None
    max_num_tokens: int | None = None  # of one input

    def prefix(self, prompt_name: str | None, instruction: str | None) -> str:
        """What goes before a text. Raises LookupError with words for the caller: an unknown name, no form for a task."""
        if instruction is not None:
            if self.instruction_form is None:
                raise LookupError(
                    "is given, but this model's files do not say how an instruction is written; "
                    "write it into the text itself"
                )
            return self.instruction_form.replace("{}", instruction)
        name = self.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise LookupError(f"is {reprlib.repr(name)}, which this model's files do not have (known: {known})")
        return self.prompts[name]


PLAIN: Final = EmbeddingSpec()
QWEN3_EMBEDDING: Final = EmbeddingSpec(
    is_declared=True,
    prompts=MappingProxyType(
        {
            QUERY: QWEN3_INSTRUCTION.replace(
                "{}", "Given a web search query, retrieve relevant passages that answer the query"
            ),
            "document": "",
        }
    ),
    instruction_form=QWEN3_INSTRUCTION,
)


def embedding_of_directory(directory: Path, hidden_size: int) -> EmbeddingSpec:
    """The spec of a model directory. Raises ModelFileError for a step, a pooling or a width that is not computed here."""
    path = directory / MODULES_NAME
    if not path.exists():
        return PLAIN
    modules = _modules(path)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds:
        raise ModelFileError(path, "names no pooling: it does not say which vector is a text's", _DO)
    for kind, module in zip(kinds, modules, strict=True):
        if kind == "Pooling":
            _check_pooling(_config_of(directory, path, module["path"]), hidden_size)
        elif kind not in ("Transformer", "Normalize"):
            raise ModelFileError(
                path, f"has the step {kind!r} after the transformer, which is not computed", "use a model without it"
            )
    prompts, default = _prompts(directory / PROMPTS_NAME)
    return EmbeddingSpec(True, prompts, default, _instruction_form(prompts), _max_num_tokens(directory / LIMITS_NAME))


def embedding_of_gguf(metadata: Metadata, architecture: str) -> EmbeddingSpec:
    """The spec of a GGUF file, which has no prompts. Raises ModelFileError for another pooling than the last token's."""
    key = f"{architecture}.pooling_type"
    pooling = metadata.integer(key)
    if pooling is None:
        return PLAIN
    if pooling not in _GGUF_LAST:
        name = _GGUF_POOLING[pooling] if 0 <= pooling < len(_GGUF_POOLING) else "unknown"
        raise metadata.fail(
            f"metadata key {key!r} is {pooling} ({name} pooling); only the last token's vector is computed", _DO
        )
    if pooling == 0:
        return PLAIN
    return QWEN3_EMBEDDING if architecture == "qwen3" else EmbeddingSpec(is_declared=True)


def spec_files(directory: Path) -> list[Path]:
    """The files that `embedding_of_directory` reads, those that are there: they are part of what the model is."""
    path = directory / MODULES_NAME
    if not path.exists():
        return []
    found = [path, directory / PROMPTS_NAME, directory / LIMITS_NAME]
    found += [directory / module["path"] / "config.json" for module in _modules(path) if module["path"]]
    return [file for file in found if file.is_file()]


def _modules(path: Path) -> list[dict[str, str]]:
    """The steps in order, each with its `type` and its `path` inside the directory."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(path, "too large for a list of modules")
        value: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not valid JSON ({error})") from None
    modules = value if isinstance(value, list) else []
    for module in modules:
        is_whole = isinstance(module, dict) and all(isinstance(module.get(key), str) for key in ("type", "path"))
        if not is_whole or module["path"].startswith(("/", "\\")) or ".." in Path(module["path"]).parts:
            raise ModelFileError(
                path, "an entry lacks 'type' or a 'path' inside the directory", "fetch the model again"
            )
    if not modules:
        raise ModelFileError(path, "is not a list of modules", "fetch the model again")
    if modules[0]["type"].rpartition(".")[2] != "Transformer":
        raise ModelFileError(path, f"begins with {modules[0]['type']!r}, a Transformer was expected", _DO)
    if modules[0]["path"]:
        raise ModelFileError(
            path, f"the transformer lies in {modules[0]['path']!r}", "give that folder's files beside modules.json"
        )
    return modules


def _config_of(directory: Path, path: Path, folder: str) -> JsonObject:
    file = directory / folder / "config.json"
    if not file.exists():
        raise ModelFileError(
            file, f"is missing, {path.name} names its folder", "download incomplete? Fetch the model again"
        )
    return JsonObject(file, read_json(file))


def _check_pooling(config: JsonObject, hidden_size: int) -> None:
    """`pooling_mode` names one mode or several, or, as it was before, `pooling_mode_<mode>` is true for each."""
    flags = [key for key in sorted(config.keys) if key.startswith("pooling_mode_") and config.flag(key)]
    modes = config.names("pooling_mode") or [key.removeprefix("pooling_mode_") for key in flags]
    if modes != [_LAST]:
        shown = " and ".join(modes) or "none"
        raise ModelFileError(config.path, f"asks for {shown} pooling; only the last token's vector is computed", _DO)
    for key in ("word_embedding_dimension", "embedding_dimension"):
        width = config.integer(key, most=1 << 20)
        if width is not None and width != hidden_size:
            raise config.refuse(key, f"the model's width is {hidden_size}", "use files of one model")


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the default one."""
    if not path.exists():
        return {}, None
    config = JsonObject(path, read_json(path))
    child = config.child("prompts")
    prompts = {} if child is None else {name: child.text(name) or "" for name in child.keys}
    # Both names are always there, as sentence-transformers has them; without a text of their own they add nothing.
    prompts = {QUERY: "", "document": "", **prompts}
    default = config.text("default_prompt_name")
    if default is not None and default not in prompts:
        raise config.refuse("default_prompt_name", f"'prompts' has no such entry ({', '.join(prompts)})", "correct it")
    width = config.integer("truncate_dim", most=1 << 20)
    if width is not None:
        raise config.refuse("truncate_dim", "a width of the files' own is not applied", "remove it; ask for dimensions")
    return prompts, default


def _instruction_form(prompts: Mapping[str, str]) -> str | None:
    """The query's prompt with a gap where its task stands."""
    match = _INSTRUCTED.fullmatch(prompts.get(QUERY, ""))
    return None if match is None else f"Instruct: {{}}\n{match[1]}"


def _max_num_tokens(path: Path) -> int | None:
    if not path.exists():
        return None
    config = JsonObject(path, read_json(path))
    if config.flag("do_lower_case"):
        raise config.refuse("do_lower_case", "texts are never changed before they are tokenized", "use another model")
    return config.integer("max_seq_length", most=1 << 31)
