# SPDX-License-Identifier: Apache-2.0
"""Which model families are served exactly, and which are refused and why. Data only.

`models/rope.py` decides by it, `lazyattention models` prints it, docs/models.md and tests/models/test_matrix.py are
held to it: a family is listed as exact when a row of that test compares it with a float64 oracle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Pairs = Literal["half-split", "interleaved"]
# How to tell the layers without RoPE: none; `module.use_rope` is false; full-attention layers; full-attention layers
# of a model that also has a sliding window.
LayersWithoutRope = Literal["none", "use_rope", "not_sliding", "not_sliding_if_windowed"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one `model_type` of transformers applies RoPE.

    Attributes:
        title: Name for people.
        pairs: Which dimensions rotate together.
        layers_without_rope: How to tell them.
        features: What else its attention does that our function implements. A model with a sliding window whose
            family does not list one here is refused: some families apply it in their mask only.
    """

    title: str
    pairs: Pairs = "half-split"
    layers_without_rope: LayersWithoutRope = "none"
    features: tuple[str, ...] = ()


# model_type -> family. A type that is neither here nor in REFUSED_FAMILIES is refused as untested.
EXACT_FAMILIES: Mapping[str, Family] = {
    "apertus": Family("Apertus", features=("q/k norm",)),
    "arcee": Family("Arcee"),
    "bitnet": Family("BitNet"),
    "cohere": Family("Cohere Command-R", "interleaved"),
    "cohere2": Family("Cohere Command R7B/A", "interleaved", "not_sliding", ("sliding window",)),
    "ernie4_5": Family("ERNIE 4.5", "interleaved"),
    "exaone4": Family("EXAONE 4", layers_without_rope="not_sliding_if_windowed", features=("sliding window",)),
    "gemma": Family("Gemma"),
    "gemma2": Family("Gemma 2", features=("sliding window", "soft-capping")),
    "gemma3_text": Family("Gemma 3 (text)", features=("sliding window", "q/k norm")),
    "gemma4_text": Family("Gemma 4 (text)", features=("sliding window", "q/k norm", "head size per layer")),
    "glm": Family("GLM-4 (first release)", "interleaved"),
    "glm4": Family("GLM-4 0414", "interleaved"),
    "glm4_moe": Family("GLM-4.5/4.6", features=("experts",)),
    "gpt_neox": Family("GPT-NeoX, Pythia"),
    "gpt_oss": Family("gpt-oss", features=("sliding window", "attention sinks", "experts")),
    "granite": Family("Granite"),
    "helium": Family("Helium", "interleaved"),
    "jetmoe": Family("JetMoE", features=("experts",)),
    "llama": Family("Llama 1-3, SmolLM 1-2, Yi, Vicuna"),
    "llama4_text": Family("Llama 4 (text)", "interleaved", "use_rope", ("q/k norm", "experts")),
    "minimax_m2": Family("MiniMax M2", features=("q/k norm", "experts")),
    "mistral": Family("Mistral", features=("sliding window",)),
    "mixtral": Family("Mixtral", features=("sliding window", "experts")),
    "olmo": Family("OLMo"),
    "olmo2": Family("OLMo 2", features=("q/k norm",)),
    "olmo3": Family("OLMo 3", features=("sliding window", "q/k norm")),
    "olmoe": Family("OLMoE", features=("q/k norm", "experts")),
    "persimmon": Family("Persimmon", features=("q/k norm",)),
    "phi": Family("Phi-1, Phi-2"),
    "phi3": Family("Phi-3, Phi-4", features=("sliding window",)),
    "phimoe": Family("Phi-3.5-MoE", features=("experts",)),
    "qwen2": Family("Qwen2, Qwen2.5", features=("sliding window",)),
    "qwen2_moe": Family("Qwen1.5/2-MoE", features=("experts",)),
    "qwen3": Family("Qwen3", features=("sliding window", "q/k norm")),
    "qwen3_moe": Family("Qwen3-MoE", features=("sliding window", "q/k norm", "experts")),
    "seed_oss": Family("Seed-OSS"),
    "smollm3": Family("SmolLM3", layers_without_rope="use_rope", features=("sliding window",)),
    "starcoder2": Family("StarCoder2", features=("sliding window",)),
}

_MLA = "multi-head latent attention (MLA) stores a compressed KV that our kernels do not read yet"
_MROPE = "multimodal RoPE (M-RoPE) turns by three positions per token; multimodal chunks are not tested"
_STATE = "linear attention or state-space layers carry a state that cannot be cut out per chunk"
_KEYWORD = "the model drops unknown keyword arguments, so our attention function would not receive its metadata"
_ABSOLUTE = "learned absolute positions are added to the input and cannot be turned afterwards"
_ALIBI = "ALiBi adds a bias per distance instead of rotating; not implemented"
_WRAPPER = "it wraps a text model together with other inputs; only the text model alone is tested, so save that one"
_OWN_ATTENTION = "the model has its own attention code and does not call a registered attention function"

# model_type -> reason, for well-known families. It is data for messages: anything unknown is refused as well.
REFUSED_FAMILIES: Mapping[str, str] = {
    "bamba": _STATE,
    "bloom": _ALIBI,
    "codegen": _OWN_ATTENTION,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "falcon": _OWN_ATTENTION,
    "falcon_h1": _STATE,
    "falcon_mamba": _STATE,
    "gemma3": _WRAPPER,
    "gemma3n": _WRAPPER,
    "gemma3n_text": "layers share the KV of other layers, which the KV pool does not model",
    "gemma4": _WRAPPER,
    "glm4_moe_lite": _MLA,
    "gpt2": _ABSOLUTE,
    "gpt_bigcode": _ABSOLUTE,
    "gpt_neo": _ABSOLUTE,
    "gptj": _OWN_ATTENTION,
    "granitemoehybrid": _STATE,
    "hunyuan_v1_dense": "q and k are normalised with weights after RoPE, and those weights do not commute with turning",
    "hunyuan_v1_moe": "q and k are normalised with weights after RoPE, and those weights do not commute with turning",
    "jamba": _STATE,
    "kimi_linear": _STATE,
    "lfm2": _STATE,
    "llama4": _WRAPPER,
    "longcat_flash": _MLA,
    "mamba": _STATE,
    "mamba2": _STATE,
    "minicpm3": _MLA,
    "minimax": _STATE,
    "mistral3": _WRAPPER,
    "mpt": _ALIBI,
    "nemotron": _KEYWORD,
    "nemotron_h": _STATE,
    "olmo_hybrid": _STATE,
    "opt": _ABSOLUTE,
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_5": _STATE,
    "qwen3_next": _STATE,
    "qwen3_vl": _MROPE,
    "recurrent_gemma": _STATE,
    "rwkv": _STATE,
    "stablelm": _KEYWORD,
    "zamba2": _STATE,
}

# RoPE type -> what it means here.
EXACT_ROPE_TYPES: Mapping[str, str] = {
    "default": "fixed frequencies",
    "linear": "fixed frequencies, divided by a factor",
    "llama3": "fixed frequencies, scaled by wavelength",
    "yarn": "fixed frequencies, interpolated; its attention factor is in q and k already",
    "proportional": "fixed frequencies, part of them zero (Gemma 4)",
}
REFUSED_ROPE_TYPES: Mapping[str, str] = {
    "dynamic": "its frequencies change with the length of the text, so stored keys become wrong as it grows",
    "longrope": "it switches to other frequencies beyond the original length, so stored keys become wrong there",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration that is tested: exact against the oracle, or refused.

    Attributes:
        model_type: As in a model's config.json.
        variant: RoPE type, or what else sets this row apart.
        refused: The reason, or None when it is exact.
    """

    model_type: str
    variant: str = "default"
    refused: str | None = None

    @property
    def title(self) -> str:
        """Name of the family for people."""
        family = EXACT_FAMILIES.get(self.model_type)
        return family.title if family else self.model_type

    @property
    def features(self) -> tuple[str, ...]:
        """What its attention does besides rotating."""
        family = EXACT_FAMILIES.get(self.model_type)
        return family.features if family else ()


_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "cohere2": ("full layers without RoPE",),
    "exaone4": ("full layers without RoPE", "default"),
    "gemma3_text": ("a table per layer type",),
    "gemma4_text": ("a table per layer type",),
    "glm": ("partial rotary",),
    "glm4": ("partial rotary",),
    "glm4_moe": ("partial rotary",),
    "gpt_neox": ("partial rotary",),
    "gpt_oss": ("yarn",),
    "llama": ("default", "linear", "llama3", "yarn"),
    "llama4_text": ("some layers without RoPE",),
    "minimax_m2": ("partial rotary",),
    "olmo3": ("yarn on full layers",),
    "persimmon": ("partial rotary",),
    "phi": ("partial rotary",),
    "phi3": ("default", "partial rotary"),
    "qwen2": ("default", "yarn", "sliding window on some layers"),
    "qwen3": ("default", "sliding window on some layers"),
    "smollm3": ("some layers without RoPE", "sliding window on some layers"),
}
_WINDOW_IN_MASK = "the model applies its sliding window in a way that does not reach the attention function"
_REFUSED_VARIANTS: tuple[Row, ...] = (
    Row("llama", "dynamic", REFUSED_ROPE_TYPES["dynamic"]),
    Row("phi3", "longrope", REFUSED_ROPE_TYPES["longrope"]),
    Row("llama4_text", "query temperature", "the query's scale depends on its absolute position"),
    Row("gemma4_text", "layers that share KV", "layers share the KV of other layers, which the KV pool does not model"),
    Row("phimoe", "sliding window", _WINDOW_IN_MASK),
    Row("qwen2_moe", "sliding window", _WINDOW_IN_MASK),
    Row("olmoe", "sliding window", _WINDOW_IN_MASK),
)


def rows() -> tuple[Row, ...]:
    """Return every row of the matrix: exact ones by family, then refused configurations, then refused families."""
    exact = tuple(
        Row(model_type, variant) for model_type in EXACT_FAMILIES for variant in _VARIANTS.get(model_type, ("default",))
    )
    families = tuple(Row(model_type, "any", reason) for model_type, reason in REFUSED_FAMILIES.items())
    return exact + _REFUSED_VARIANTS + families


def to_markdown() -> str:
    """Return the matrix as two Markdown tables; docs/models.md contains exactly this text."""
    lines = ["| family | model_type | RoPE | pairs | besides |", "|---|---|---|---|---|"]
    for row in rows():
        if row.refused is None:
            pairs = EXACT_FAMILIES[row.model_type].pairs
            lines.append(f"| {row.title} | `{row.model_type}` | {row.variant} | {pairs} | {', '.join(row.features)} |")
    lines += ["", "| refused | which | reason |", "|---|---|---|"]
    lines += [f"| `{row.model_type}` | {row.variant} | {row.refused} |" for row in rows() if row.refused is not None]
    return "\n".join(lines) + "\n"
