"""What a model's files say on embedding, and the vectors they then give: transformers' and sentence-transformers' own."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.agent.model.embedding_model import TASK, modules, save_embedding_model, write_layout
from tests.needs import need_cpu_kernels, skip_without

from dragoman.step_model import StepModel
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import KV_DTYPES, NATIVE_FLOAT32, TORCH_FLOAT32
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Embedded, Sampling, Start, StartEmbed, Stop
from dragoman_agent.model.embedding import PLAIN, QWEN3_EMBEDDING, embedding_of_directory
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import Plan
from dragoman_agent.rpc.embedding import unit_vectors
from dragoman_text import TextTokenizer

Embed = Callable[..., Any]
TEXTS = [
    "What is the capital of China?",
    "Explain gravity",
    "The capital of China is Beijing.",
    "Gravity is a force that attracts two bodies towards each other. It gives weight to physical objects.",
    "x",
    "and so it goes on " * 9,
]


def test_a_directory_without_the_layout_says_nothing(tmp_path: Path) -> None:
    assert embedding_of_directory(tmp_path, 64) is PLAIN
    assert PLAIN.prefix(None, None) == ""
    with pytest.raises(LookupError, match="known: none"):
        PLAIN.prefix("query", None)
    with pytest.raises(LookupError, match="do not say how an instruction is written"):
        PLAIN.prefix(None, "Find it")


def test_the_publishers_files_are_qwen3_embedding(tmp_path: Path) -> None:
    write_layout(tmp_path)
    spec = embedding_of_directory(tmp_path, 64)
    assert spec == QWEN3_EMBEDDING
    assert spec.prefix("query", None) == f"Instruct: {TASK}\nQuery:"
    assert spec.prefix("document", None) == spec.prefix(None, None) == ""
    assert spec.prefix(None, "Find {} it") == "Instruct: Find {} it\nQuery:"


@pytest.mark.parametrize("query", ["Instruct: a task\nQuery: ", "Instruct: \nQuery:"])
def test_the_form_of_an_instruction_comes_from_the_files(tmp_path: Path, query: str) -> None:
    write_layout(
        tmp_path, prompts={"prompts": {"query": query}, "default_prompt_name": "query"}, limits={"max_seq_length": 9}
    )
    spec = embedding_of_directory(tmp_path, 64)
    assert spec.prefix(None, None) == spec.prefix("query", None) == query  # the default goes before every text
    assert spec.prefix(None, "mine") == "Instruct: mine\n" + query.partition("\n")[2]
    assert (spec.prefix("document", None), spec.max_num_tokens) == ("", 9)


@pytest.mark.parametrize(
    "pooling",
    [
        {"embedding_dimension": 64, "pooling_mode": "lasttoken"},
        {"embedding_dimension": 64, "pooling_mode": ["lasttoken"], "include_prompt": True},
    ],
)
def test_the_words_of_newer_files(tmp_path: Path, pooling: dict[str, Any]) -> None:
    library = "sentence_transformers.sentence_transformer.modules.pooling"
    write_layout(tmp_path, pooling=pooling, steps=modules("", "1_Pooling", library=library))
    assert embedding_of_directory(tmp_path, 64).is_declared


@pytest.mark.parametrize(
    ("layout", "file", "words"),
    [
        ({"pooling": {"pooling_mode_mean_tokens": True}}, "1_Pooling/config.json", "asks for mean_tokens pooling"),
        (
            {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}},
            "1_Pooling/config.json",
            "asks for cls_token and lasttoken pooling",
        ),
        ({"pooling": {"pooling_mode": "max"}}, "1_Pooling/config.json", "asks for max pooling"),
        ({"pooling": {"word_embedding_dimension": 64}}, "1_Pooling/config.json", "asks for none pooling"),
        (
            {"pooling": {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}},
            "1_Pooling/config.json",
            "the model's width is 64",
        ),
        ({"steps": modules("", "1_Pooling", "2_Dense")}, "modules.json", "has the step '2_Dense'"),
        ({"steps": modules("", "2_Normalize")}, "modules.json", "names no pooling"),
        ({"steps": modules("1_Pooling", "")}, "modules.json", "begins with"),
        ({"steps": []}, "modules.json", "is not a list of modules"),
        ({"steps": {"a": 1}}, "modules.json", "is not a list of modules"),
        ({"steps": [{"type": "Transformer"}]}, "modules.json", "lacks 'type' or a 'path'"),
        ({"steps": [{"type": "Transformer", "path": "../other"}]}, "modules.json", "inside the directory"),
        (
            {"steps": [*modules("", "1_Pooling"), {"path": "3_Pooling", "type": "Pooling"}]},
            "3_Pooling/config.json",
            "is missing",
        ),
        (
            {"prompts": {"prompts": {"query": "a"}, "default_prompt_name": "passage"}},
            "config_sentence_transformers.json",
            "no such entry",
        ),
        ({"prompts": {"truncate_dim": 32}}, "config_sentence_transformers.json", "ask for dimensions"),
        ({"limits": {"do_lower_case": True}}, "sentence_bert_config.json", "never changed"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(tmp_path: Path, layout: dict[str, Any], file: str, words: str) -> None:
    write_layout(tmp_path, **layout)
    with pytest.raises(ModelFileError) as refused:
        embedding_of_directory(tmp_path, 64)
    assert str(tmp_path / file) in str(refused.value)
    assert words in str(refused.value)


def test_files_that_are_no_json_and_too_large_ones(tmp_path: Path) -> None:
    write_layout(tmp_path)
    path = tmp_path / "modules.json"
    path.write_text("[{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        embedding_of_directory(tmp_path, 64)
    path.write_text(json.dumps(modules("", "1_Pooling")) + " " * (65 << 20))
    with pytest.raises(ModelFileError, match="too large"):
        embedding_of_directory(tmp_path, 64)


def plan(road: str) -> Plan:
    """Room for all texts at once, steps so small that long ones are cut."""
    return Plan(
        device_kind="cpu",
        model_name="embedding",
        page_size=16,
        num_blocks=200,
        max_context_tokens=256,
        max_batch_tokens=48,
        max_num_seqs=16,
        max_num_waiting=64,
        num_threads=2,
        road=road,
        kv_dtype=KV_DTYPES[road],
        memory=(),
        step_model=StepModel((1,), (0,), (0.01,), 300.0, 0.01),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-embedding")
    save_embedding_model(path)
    return path


@pytest.fixture(params=[NATIVE_FLOAT32, TORCH_FLOAT32])
def embed(directory: Path, request: pytest.FixtureRequest) -> Iterator[Embed]:
    """Vectors float32 [num_prompts, hidden_size], not normalised, of an engine whose prefix cache is empty."""
    if request.param != TORCH_FLOAT32:
        need_cpu_kernels()
    source = open_model(str(directory), directory)
    device = CpuDevice()
    device.load(source, plan(request.param), lambda _: None)

    def run(prompts: list[list[int]], *others: Start) -> Any:
        core = build_core(device, source, plan(request.param))
        commands = [StartEmbed(str(i), ids) for i, ids in enumerate(prompts)]
        events = [event for event in run_all(core, [*others, *commands]) if isinstance(event, Embedded)]
        found = {event.request_id: event.values for event in events}
        return np.frombuffer(b"".join(found[str(i)] for i in range(len(prompts))), "<f4").reshape(len(prompts), -1)

    yield run
    device.close()


def our_ids(directory: Path, prefix: str = "") -> list[list[int]]:
    source = open_model(str(directory), directory)
    return [TextTokenizer.from_files(source.tokenizer).encode(prefix + text) for text in TEXTS]


def test_last_tokens_vectors_are_transformers(directory: Path, embed: Embed) -> None:
    """As the model card computes them: padded on the left, the last position of the last hidden state."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left", pad_token="<|end|>")
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    ids = our_ids(directory)
    assert ids == tokenizer(TEXTS)["input_ids"]
    assert {row[-1] for row in ids} == {tokenizer.convert_tokens_to_ids("<|end|>")}
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = model(**batch).last_hidden_state[:, -1]
    for dimensions in (None, 24):
        mine = unit_vectors([row.tobytes() for row in embed(ids)], dimensions)
        theirs = torch.nn.functional.normalize(expected[:, :dimensions], dim=1).numpy()
        assert (mine * theirs).sum(axis=1).min() > 0.99999
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize("prompt_name", [None, "query", "document"])
def test_vectors_are_those_of_sentence_transformers(directory: Path, embed: Embed, prompt_name: str | None) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        skip_without("sentence-transformers", "needs the package sentence-transformers, which is not installed")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    for dimensions in (None, 24):
        theirs = model.encode(TEXTS, prompt_name=prompt_name, truncate_dim=dimensions, normalize_embeddings=True)
        prefix = open_model(str(directory), directory).embedding.prefix(prompt_name, None)
        mine = unit_vectors([row.tobytes() for row in embed(our_ids(directory, prefix))], dimensions)
        assert (mine * theirs).sum(axis=1).min() > 0.99999


def test_a_batch_equals_one_at_a_time(directory: Path, embed: Embed, request: pytest.FixtureRequest) -> None:
    ids = our_ids(directory)
    busy = Start("busy", ids[3], Sampling(temperature=0.0), Stop(max_output_tokens=12), credit=1 << 30)
    together = embed(ids, busy)
    alone = np.concatenate([embed([row]) for row in ids])
    if request.node.callspec.params["embed"] == NATIVE_FLOAT32:
        assert (together == alone).all()  # bit by bit: rows do not see each other
    np.testing.assert_allclose(together, alone, atol=2e-5)
