"""From a config.json to a ModelConfig: every key checked, nothing guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from dragoman_agent.model.config import ModelConfig, RopeScaling
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.hf_rope import MAX_POSITIONS, rope_of
from dragoman_agent.model.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class HfArchitecture:
    """What sets one architecture apart."""

    name: str
    qk_norm: bool = False
    always_biased: bool = False  # q, k and v have biases whatever the file says, the output projection has none
    may_be_biased: bool = False  # `attention_bias` gives q, k, v and the output projection biases
    windowed_by: str | None = None  # the key that must be true for `sliding_window` to count


_FAMILIES: Final = MappingProxyType(
    {
        "Llama": HfArchitecture("llama", may_be_biased=True),
        "Mistral": HfArchitecture("mistral"),
        "Qwen2": HfArchitecture("qwen2", always_biased=True, windowed_by="use_sliding_window"),
        "Qwen3": HfArchitecture("qwen3", qk_norm=True, may_be_biased=True, windowed_by="use_sliding_window"),
    }
)
HF_ARCHITECTURES: Final = MappingProxyType(
    {f"{family}{suffix}": known for family, known in _FAMILIES.items() for suffix in ("ForCausalLM", "Model")}
)
_BY_MODEL_TYPE: Final = MappingProxyType({known.name: known for known in _FAMILIES.values()})


def config_from_hf(path: Path, value: Mapping[str, Any], name: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Shapes and constants of the config.json at `path` with content `value`.

    `tied_embeddings` is what the file says, False when it says nothing (see `head_is_tied`). Raises ModelFileError
    naming the key that is missing, wrong, impossible beside another, or not supported.
    """
    config = JsonObject(path, value)
    architecture = _architecture(config)
    _refuse_other_computations(config)
    heads = config.required_integer("num_attention_heads", most=1 << 12)
    hidden_size = config.required_integer("hidden_size", most=1 << 20)
    num_layers = config.required_integer("num_hidden_layers", most=1 << 10)
    biased = architecture.may_be_biased and bool(config.flag("attention_bias"))
    rope_theta, rope_scaling = rope_of(config)
    return ModelConfig(
        name=name,
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.required_integer("intermediate_size", most=1 << 22),
        num_heads=heads,
        num_kv_heads=_num_kv_heads(config, heads),
        head_dim=_head_dim(config, hidden_size, heads),
        vocab_size=config.required_integer("vocab_size", most=1 << 24),
        max_context_tokens=_max_context_tokens(config, rope_scaling),
        rope_theta=rope_theta,
        rms_norm_eps=config.required_positive("rms_norm_eps"),
        tied_embeddings=bool(config.flag("tie_word_embeddings")),
        rope_scaling=rope_scaling,
        attention_bias=architecture.always_biased or biased,
        attention_output_bias=biased,
        qk_norm=architecture.qk_norm,
        sliding_window=_sliding_window(config, architecture, num_layers),
        bos_token_id=_first_token(config, "bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def _architecture(config: JsonObject) -> HfArchitecture:
    named = config.texts("architectures")
    if named:
        known = HF_ARCHITECTURES.get(named[0])
        if known is None or len(named) > 1:
            raise config.refuse(
                "architectures", f"not supported (known: {', '.join(HF_ARCHITECTURES)})", "use a known architecture"
            )
        return known
    model_type = config.text("model_type")
    if model_type is None:
        raise config.missing("architectures")
    if model_type not in _BY_MODEL_TYPE:
        raise config.refuse(
            "model_type", f"not supported (known: {', '.join(_BY_MODEL_TYPE)})", "use a known architecture"
        )
    return _BY_MODEL_TYPE[model_type]


def _refuse_other_computations(config: JsonObject) -> None:
    if "quantization_config" in config:
        quantised = config.child("quantization_config")
        method = None if quantised is None else quantised.text("quant_method")
        raise ModelFileError(
            config.path,
            f"the weights are quantised ({method or 'method not named'}), which is not supported in safetensors files",
            "use the unquantised model or a GGUF file",
        )
    activation = config.text("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise config.refuse("hidden_act", "only 'silu' is supported")
    if config.flag("mlp_bias"):
        raise config.refuse("mlp_bias", "biases in the feed-forward layers are not supported")
    if (config.positive("partial_rotary_factor") or 1.0) != 1.0:
        raise config.refuse("partial_rotary_factor", "rotating a part of each head is not supported")
    if (config.integer("num_experts", most=1 << 20, least=0) or 0) > 0:
        raise config.refuse("num_experts", "mixtures of experts are not supported", "use a dense model")


def _num_kv_heads(config: JsonObject, heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", most=1 << 12) or heads
    if heads % num_kv_heads:
        raise config.refuse(
            "num_key_value_heads", f"{heads} attention heads cannot share that many evenly", "correct the file"
        )
    return num_kv_heads


def _head_dim(config: JsonObject, hidden_size: int, heads: int) -> int:
    """The file's `head_dim`, else hidden_size / num_attention_heads."""
    head_dim = config.integer("head_dim", most=1 << 12)
    if head_dim is None:
        if hidden_size % heads:
            raise ModelFileError(
                config.path,
                f"key 'head_dim' is missing and hidden_size {hidden_size} is not a multiple of {heads} attention heads",
                "complete the file, or fetch it again",
            )
        head_dim = hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise ModelFileError(config.path, f"head size {head_dim} (key 'head_dim') is not an even number")
    return head_dim


def _max_context_tokens(config: JsonObject, scaling: RopeScaling) -> int:
    """`max_position_embeddings`; yarn's stretched length where that is longer, as publishers add yarn without
    raising the other key.
    """
    named = config.required_integer("max_position_embeddings", most=MAX_POSITIONS)
    if scaling.kind != "yarn":
        return named
    return max(named, min(int(scaling.factor * scaling.original_max_position), MAX_POSITIONS))


def _sliding_window(config: JsonObject, architecture: HfArchitecture, num_layers: int) -> int | None:
    """Window of every layer, None for full attention. Raises for models that mix the two."""
    window = config.integer("sliding_window", most=MAX_POSITIONS, least=0) or None
    if architecture.name == "llama" or window is None:
        return None
    kinds = set(config.texts("layer_types") or ())
    if architecture.windowed_by is not None:
        if not config.flag(architecture.windowed_by):
            return None
        if not kinds:
            first = config.integer("max_window_layers", most=1 << 20, least=0)
            if first is None:
                raise config.missing("max_window_layers")
            kinds = {"sliding_attention"} if first == 0 else {"full_attention"} if first >= num_layers else {"both"}
    if kinds <= {"sliding_attention"}:
        return window
    if kinds == {"full_attention"}:
        return None
    raise config.refuse("sliding_window", "it covers some layers only, which is not supported")


def _first_token(config: JsonObject, key: str) -> int | None:
    return config.integer(key, most=1 << 24, least=0)


def head_is_tied(
    path: Path, says_tied: bool | None, *, has_head: bool, head_equals_embedding: bool, without_prefix: bool
) -> tuple[bool, str | None]:
    """Whether the embedding is the output head, and a warning where the files contradict each other.

    A head of its own in the files is used unless it equals the embedding. Without one the config must say that the
    two are tied, or say nothing; a bare decoder (names without `model.`, as embedding models have) needs no head.
    Raises ModelFileError when the config says untied and the head is missing.
    """
    if has_head:
        if head_equals_embedding:
            return True, None
        if says_tied:
            return False, (
                f"{path}: tie_word_embeddings is true, yet 'lm_head.weight' differs from the embedding; "
                "the head in the files is used"
            )
        return False, None
    if says_tied:
        return True, None
    if without_prefix:
        return True, (
            f"{path}: no 'lm_head.weight' and tie_word_embeddings is not true: a bare decoder, meant for embeddings; "
            "text it generates comes from the embedding as its head"
        )
    if says_tied is None:
        return True, f"{path}: no 'lm_head.weight' and no tie_word_embeddings; the embedding is taken as the head"
    raise ModelFileError(
        path,
        "tie_word_embeddings is false, yet the files hold no 'lm_head.weight'",
        "download incomplete? Fetch the model again",
    )
