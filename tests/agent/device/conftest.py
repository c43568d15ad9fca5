"""Random models made by transformers with their weights in our names, and a driver that lays sequences out in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dragoman.step_model import StepModel
from dragoman_agent.device.base import SamplingBatch, StepBatch
from dragoman_agent.model.config import ModelConfig, RopeScaling
from dragoman_agent.model.layout import TensorLayout
from dragoman_agent.pal.plan import Plan
from dragoman_kernels.tensor import QuantTensor

SIZES = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.08,
}


@dataclass
class RandomModel:
    """A reference model and a source of its weights (F32) under canonical names: what a device reads of a ModelSource."""

    reference: Any
    config: ModelConfig
    tensors: dict[str, QuantTensor] = field(repr=False)
    name: str = "random"

    @property
    def total_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())

    def tensor_names(self) -> list[str]:
        return list(self.tensors)

    def layout(self, name: str) -> TensorLayout:
        tensor = self.tensors[name]
        return TensorLayout(tensor.dtype, tensor.shape, tensor.data.nbytes)

    def tensor(self, name: str) -> QuantTensor:
        return self.tensors[name]

    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], np.ndarray]:
        """The reference's greedy tokens and the logits [num_tokens, vocab_size] each came from."""
        out = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        rows = torch.cat(out.logits).numpy()
        return out.sequences[0, len(prompt) :].tolist(), rows


RENAMED = {
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "o_proj",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
}


def canonical_name(name: str) -> str:
    """Our name of a transformers parameter."""
    module, kind = name.removeprefix("model.").rsplit(".", 1)
    for theirs, ours in RENAMED.items():
        module = module.replace(theirs, ours)
    return f"{module}.bias" if kind == "bias" else module


def make_random_model(
    architecture: str, *, tied: bool = False, rope: dict[str, Any] | None = None, **changes: Any
) -> RandomModel:
    """A random model of `architecture`; `rope` are transformers' rope parameters."""
    sizes = SIZES | changes
    torch.set_num_threads(1)
    torch.manual_seed(11)
    config_type = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[architecture]
    parameters = {"rope_type": "default", "rope_theta": 10000.0} | (rope or {})
    more: dict[str, Any] = (
        {"sliding_window": None} if architecture == "mistral" and "sliding_window" not in changes else {}
    )
    config = config_type(
        **sizes, **more, rope_parameters=parameters, tie_word_embeddings=tied, attn_implementation="eager"
    )
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.6, 1.4)
            elif name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
    tensors = {}
    for name, parameter in reference.named_parameters():
        values = np.ascontiguousarray(parameter.detach().numpy())
        rows, cols = values.shape if values.ndim == 2 else (1, len(values))
        tensors[canonical_name(name)] = QuantTensor("F32", (rows, cols), values.view(np.uint8).reshape(rows, -1))
    kinds = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
    return RandomModel(
        reference,
        ModelConfig(
            name="random",
            architecture=architecture,
            num_layers=sizes["num_hidden_layers"],
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_heads=sizes["num_attention_heads"],
            num_kv_heads=sizes["num_key_value_heads"],
            head_dim=sizes["head_dim"],
            vocab_size=sizes["vocab_size"],
            max_context_tokens=sizes["max_position_embeddings"],
            rope_theta=parameters["rope_theta"],
            rms_norm_eps=sizes["rms_norm_eps"],
            tied_embeddings=tied,
            rope_scaling=RopeScaling(
                kind=kinds[parameters["rope_type"]],
                factor=parameters.get("factor", 1.0),
                low_freq_factor=parameters.get("low_freq_factor", 1.0),
                high_freq_factor=parameters.get("high_freq_factor", 4.0),
                original_max_position=parameters.get("original_max_position_embeddings", 0),
            ),
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=changes.get("sliding_window"),
        ),
        tensors,
    )


@pytest.fixture(scope="session")
def random_model() -> Any:
    """`make_random_model`, each combination made once."""
    made: dict[str, RandomModel] = {}

    def make(architecture: str, **options: Any) -> RandomModel:
        key = f"{architecture} {options}"
        if key not in made:
            made[key] = make_random_model(architecture, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """A plan for a model; keywords change its fields."""

    def make(model: Any, road: str, **changes: Any) -> Plan:
        fields = {
            "device_kind": "cpu",
            "model_name": model.name,
            "page_size": 16,
            "num_blocks": 200,
            "max_context_tokens": min(512, model.config.max_context_tokens),
            "max_batch_tokens": 256,
            "max_num_seqs": 64,
            "max_num_waiting": 64,
            "num_threads": 1,  # the models are tiny: a second thread would only be waited for
            "road": road,
            "kv_dtype": "float16" if road == "native-int8" else "float32",
            "memory": (),
            "step_model": StepModel((1,), (0,), (0.01,), 200.0, 0.01),
        }
        return Plan(**fields | changes)

    return make


def greedy_sampling(num: int, **columns: Any) -> SamplingBatch:
    """Sampling of `num` greedy rows; keywords replace whole columns."""
    values = {
        "temperatures": np.zeros(num, np.float32),
        "top_ks": np.zeros(num, np.int32),
        "top_ps": np.ones(num, np.float32),
        "min_ps": np.zeros(num, np.float32),
        "seeds": np.arange(num, dtype=np.uint64),
        "choices": np.zeros(num, np.int32),
        "cursors": np.zeros(num, np.int32),
        "num_logprobs": np.full(num, -1, np.int32),
    }
    return SamplingBatch(**values | columns)


@dataclass
class Sequence:
    """Tokens of a sequence, how many of them are in the cache, and its blocks."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Pages:
    """Gives blocks in a shuffled order, so that nothing works by lying side by side, and builds steps."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self._free = list(np.random.default_rng(seed).permutation(np.arange(1, plan.num_blocks)))
        self._steps = 0

    def batch(
        self, work: Iterable[tuple[Sequence, int]], *, pool: Iterable[int] = (), **sampling: Any
    ) -> tuple[StepBatch, list[Sequence]]:
        """A step that computes the next tokens of each sequence; those that reach their end are sampled."""
        page, parts = self.plan.page_size, list(work)
        positions = []
        for sequence, count in parts:
            end = sequence.computed + count
            while len(sequence.blocks) * page < end:
                sequence.blocks.append(int(self._free.pop()))
            positions.append(np.arange(sequence.computed, end))
        tables = np.zeros((len(parts), max(len(sequence.blocks) for sequence, _ in parts)), np.int32)
        for row, (sequence, _) in enumerate(parts):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        slots = [np.array(s.blocks)[at // page] * page + at % page for (s, _), at in zip(parts, positions, strict=True)]
        ids = [s.tokens[s.computed : s.computed + count] for s, count in parts]
        ends = [i for i, (s, count) in enumerate(parts) if count == s.pending]
        self._steps += 1
        step = StepBatch(
            step=self._steps,
            token_ids=np.concatenate(ids).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            query_starts=np.cumsum([0, *(count for _, count in parts)]).astype(np.int32),
            context_lens=np.array([s.computed + count for s, count in parts], np.int32),
            block_tables=tables,
            prompt_lens=np.array([len(s.tokens) for s, _ in parts], np.int32),
            sample_seqs=np.array(ends, np.int32),
            pool_seqs=np.array(list(pool), np.int32),
            sampling=greedy_sampling(len(ends), **sampling),
        )
        for sequence, count in parts:
            sequence.computed += count
        return step, [parts[i][0] for i in ends]

    def release(self, sequence: Sequence) -> None:
        self._free.extend(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0


@pytest.fixture(scope="session")
def pages() -> type[Pages]:
    return Pages


@pytest.fixture(scope="session")
def new_sequence() -> type[Sequence]:
    return Sequence
