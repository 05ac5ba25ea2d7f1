# SPDX-License-Identifier: Apache-2.0
"""Every option of an unlearning run, checked on construction.

Where the SIMU paper (arXiv:2510.07822), as far as we can read it, is silent or ambiguous, the choice is a named
option here. No default below is "the paper's value" unless its line says so; docs/unlearning_fidelity.md lists them.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lazyattention.errors import ConfigError

NeuronAxis = Literal["in", "out"]
Sign = Literal["support", "literal", "abs"]
PathKind = Literal["layerwise", "joint", "fast"]


def _check_choices(config: object) -> None:
    """Raise ConfigError for any `Literal` field of a dataclass whose value is not one of its choices."""
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is Literal and getattr(config, name) not in typing.get_args(hint):
            choices = ", ".join(repr(choice) for choice in typing.get_args(hint))
            raise ConfigError(f"{name} must be one of {choices}, got {getattr(config, name)!r}")


def _check(condition: bool, name: str, allowed: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionConfig:
    """Step 1: how neurons are scored.

    Attributes:
        neuron_axis: "in" = input units of the down-projection (intermediate_size); "out" = its output units.
        sign: "support" = neurons that lower the answer's loss; "literal" = the printed formula, which with
            L = -log P picks those that raise it; "abs" = either.
        path: "layerwise" = one layer scaled at a time, prefix cached; "joint" = all layers scaled together;
            "fast" = gradient times activation, one pass, a different score.
        rule: Riemann points j/m ("right", as printed), (j - 1/2)/m ("midpoint", smaller error), or ((j - 1/2)/m)**4
            with matching weights ("power": for models that normalise the MLP's output, such as OLMo 2 and Gemma 2
            and 3, whose loss along the path changes near 0 only).
        num_steps: Points m on the path. Not known from the paper.
        positions: "answer" = only positions that predict an answer token; "all" = prompt positions too.
        contrast: Subtract the retain set's score per token. Ours, not the paper's.
        batch_size: Examples per pass.
        max_examples: Score at most so many examples of each set; None = all.
    """

    neuron_axis: NeuronAxis = "in"
    sign: Sign = "support"
    path: PathKind = "layerwise"
    rule: Literal["right", "midpoint", "power"] = "midpoint"
    num_steps: int = 20
    positions: Literal["answer", "all"] = "answer"
    contrast: bool = False
    batch_size: int = 8
    max_examples: int | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        _check(self.num_steps >= 1, "attribution.num_steps", "at least 1", self.num_steps)
        _check(self.batch_size >= 1, "attribution.batch_size", "at least 1", self.batch_size)
        _check(self.max_examples is None or self.max_examples >= 1, "attribution.max_examples", "None or >= 1", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronConfig:
    """Which neurons become trainable.

    Attributes:
        control: "attributed" = by score; "random" = as many per layer, drawn at random; "none" = no neuron
            (attention only); "all" = every neuron of every down-projection.
        select: "threshold" = above `threshold` times the layer's maximum (the paper's rule); "top_p" = the fewest
            neurons that hold `top_p` of the positive score; "budget" = the share `budget` with the highest score.
        threshold: t in (0, 1]. Not known from the paper.
        top_p: Share of positive score, in (0, 1].
        budget: Share of neurons, in (0, 1].
        scope: "layer" or "global", for top_p and budget.
        dual: What happens to neurons critical for both sets: "keep" (reported as better), "drop", "only".
        min_per_layer: Neurons kept in a layer whose rule selects fewer (0 = an empty layer is allowed, reported).
        seed: Of the random control.
    """

    control: Literal["attributed", "random", "none", "all"] = "attributed"
    select: Literal["threshold", "top_p", "budget"] = "threshold"
    threshold: float = 0.2
    top_p: float = 0.5
    budget: float = 0.02
    scope: Literal["layer", "global"] = "layer"
    dual: Literal["keep", "drop", "only"] = "keep"
    min_per_layer: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("threshold", "top_p", "budget"):
            _check(0.0 < getattr(self, name) <= 1.0, f"neurons.{name}", "in (0, 1]", getattr(self, name))
        _check(self.min_per_layer >= 0, "neurons.min_per_layer", "at least 0", self.min_per_layer)
        if self.select == "threshold" and self.threshold == 1.0 and self.min_per_layer == 0:
            raise ConfigError(
                "neurons.threshold = 1 with min_per_layer = 0 selects nothing; lower one, raise the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The update rule.

    Attributes:
        name: "sophia" (second order) or "adamw" (first order).
        lr: Peak learning rate.
        betas: Decay of the momentum and of the curvature (adamw: of the squared gradient).
        rho: Sophia's factor of the curvature, the literature's gamma.
        clip_target: None = rho as given; else rho is set anew after each curvature estimate so that this share of
            entries is clipped. Ours: on a model that knows the answers by heart the curvature is near 0, a fixed rho
            clips nearly everything, and the update degenerates to sign-momentum.
        eps: Floor of rho * H (form "max") or addend (form "add").
        weight_decay: Decoupled; applied to trainable entries only.
        estimator: "gnb" = Gauss-Newton-Bartlett with sampled labels; "squared_grad" = the training gradient
            squared at every step, as in SOUL's code.
        curvature_set: What H is the curvature of, for "gnb".
        hessian_interval: Steps between estimates, for "gnb".
        denominator: "max" = max(rho * H, eps); "add" = rho * H + eps.
        curvature_factor: Multiplies H in the denominator (SOUL's code: 5120).
        double_momentum: Run the momentum average twice per step (SOUL's code).
        max_grad_norm: 0 = no clipping.
        clip_over: "trainable" = gradients are masked first; "all" = frozen neurons' gradients count in the norm.
        master_weights: Keep fp32 copies of the trainable entries when weights are bf16 or fp16.
    """

    name: Literal["sophia", "adamw"] = "sophia"
    lr: float = 2e-5
    betas: tuple[float, float] = (0.9, 0.95)
    rho: float = 0.04
    clip_target: float | None = None
    eps: float = 1e-12
    weight_decay: float = 0.0
    estimator: Literal["gnb", "squared_grad"] = "gnb"
    curvature_set: Literal["both", "retain", "forget"] = "both"
    hessian_interval: int = 10
    denominator: Literal["max", "add"] = "max"
    curvature_factor: float = 1.0
    double_momentum: bool = False
    max_grad_norm: float = 1.0
    clip_over: Literal["trainable", "all"] = "trainable"
    master_weights: bool = True

    def __post_init__(self) -> None:
        _check_choices(self)
        object.__setattr__(self, "betas", tuple(self.betas))
        _check(self.lr > 0, "optimizer.lr", "positive", self.lr)
        _check(
            len(self.betas) == 2 and all(0.0 <= b < 1.0 for b in self.betas),
            "optimizer.betas",
            "two numbers in [0, 1)",
            self.betas,
        )
        for name in ("rho", "eps", "curvature_factor"):
            _check(getattr(self, name) > 0, f"optimizer.{name}", "positive", getattr(self, name))
        clip_target = self.clip_target
        _check(clip_target is None or 0 < clip_target < 1, "optimizer.clip_target", "None or in (0, 1)", clip_target)
        for name in ("weight_decay", "max_grad_norm"):
            _check(getattr(self, name) >= 0, f"optimizer.{name}", "at least 0", getattr(self, name))
        _check(self.hessian_interval >= 1, "optimizer.hessian_interval", "at least 1", self.hessian_interval)

    @classmethod
    def soul(cls, **changes: object) -> "OptimizerConfig":
        """The update rule of SOUL's published code (arXiv:2404.18239), which differs from Sophia's paper.

        Squared training gradients at every step, the momentum average run twice, a factor 5120 in the denominator.
        """
        parity: dict[str, Any] = {
            "lr": 5e-6,
            "estimator": "squared_grad",
            "denominator": "add",
            "eps": 1e-15,
            "curvature_factor": 5120.0,
            "double_momentum": True,
            "weight_decay": 0.1,
        }
        return cls(**(parity | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised: forget_weight * forget_loss + retain_weight * retain_loss.

    Attributes:
        name: A name in `objectives.OBJECTIVES`.
        forget_weight: Factor of the forget term.
        retain_weight: Factor of the retain term (papers: alpha, gamma).
        retain_loss: "nll" on the retain answers, or "kl" to the original model on them.
        beta: Inverse temperature of NPO (0.1) or SimNPO (4.5); None = that method's usual value.
        npo_reduction: "sum" of log-probabilities over a sequence, or their "mean" (SOUL's code).
        simnpo_margin: SimNPO's margin, nats per token.
        undial_beta: What UNDIAL subtracts from the true token's logit.
    """

    name: str = "graddiff"
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    retain_loss: Literal["nll", "kl"] = "nll"
    beta: float | None = None
    npo_reduction: Literal["sum", "mean"] = "sum"
    simnpo_margin: float = 0.0
    undial_beta: float = 10.0

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("forget_weight", "retain_weight", "undial_beta"):
            _check(getattr(self, name) >= 0, f"objective.{name}", "at least 0", getattr(self, name))
        _check(self.beta is None or self.beta > 0, "objective.beta", "None or positive", self.beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the run is carried out.

    Attributes:
        trainable: "selected" = attention and neurons as said by the other options; "everything" = every weight of
            the model, for baselines; then attention and neurons say nothing.
        attention: "full" = all attention projections are trained (as SIMU); "lora" = adapters on them;
            "frozen" = only the selected neurons.
        num_epochs: Passes over the forget set.
        batch_size: Forget examples per device and step; as many retain examples beside them.
        gradient_accumulation_steps: Batches per update.
        warmup_ratio: Share of steps with rising learning rate.
        schedule: A transformers schedule name.
        dtype: Of the weights; "auto" = as stored. optimizer.state is fp32 always.
        gradient_checkpointing: Trade time for activation memory.
        lora_rank: Of the attention adapters.
        lora_alpha: Of the attention adapters.
        adapter_in: What happens to a LoRA adapter given with the model: "merge" into the weights, or "continue"
            training it (attention = "lora").
        quantize: Load the frozen base in 8 or 4 bits through bitsandbytes; down-projections stay unquantised.
        device: "auto" = CUDA if present.
        max_len: Tokens per example; longer answers are cut, with a warning.
        template: How questions are put: "chat", "plain", or "auto" = chat if the tokenizer has a chat template.
        seed: Of data order, label sampling and initial adapters.
        save_steps: Steps between checkpoints for `resume`; 0 = none.
    """

    trainable: Literal["selected", "everything"] = "selected"
    attention: Literal["full", "lora", "frozen"] = "full"
    num_epochs: int = 5
    batch_size: int = 4
    gradient_accumulation_steps: int = 1
    warmup_ratio: float = 0.1
    schedule: str = "linear"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool = False
    lora_rank: int = 16
    lora_alpha: int = 32
    adapter_in: Literal["merge", "continue"] = "merge"
    quantize: Literal["none", "8bit", "4bit"] = "none"
    device: str = "auto"
    max_len: int = 512
    template: Literal["auto", "chat", "plain"] = "auto"
    seed: int = 0
    save_steps: int = 0

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("num_epochs", "batch_size", "gradient_accumulation_steps", "lora_rank", "max_len"):
            _check(getattr(self, name) >= 1, f"train.{name}", "at least 1", getattr(self, name))
        _check(0.0 <= self.warmup_ratio < 1.0, "train.warmup_ratio", "in [0, 1)", self.warmup_ratio)
        _check(self.save_steps >= 0, "train.save_steps", "at least 0", self.save_steps)
        if self.adapter_in == "continue" and self.attention != "lora":
            raise ConfigError("train.adapter_in = 'continue' needs train.attention = 'lora'; set it, or use 'merge'")
        if self.quantize != "none" and self.attention != "lora":
            raise ConfigError("train.quantize needs train.attention = 'lora': quantised weights cannot be trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """When a run stops, and when its result is refused.

    Attributes:
        eval_every: Steps between measurements of forget and retain; 0 = only before and after.
        target_metric: What has to reach the target: the forget answers' mean `loss` (nats per token),
            `extraction_strength`, `exact_memorization` or `answer_probability`.
        target: Its value; None = the value on the holdout set if one is given, else no target.
        max_utility_drop: Largest allowed fall of the retain set's exact memorisation (share of tokens right), in
            points of 100. When the next measurement passes it, the last acceptable weights come back and the run ends.
        collapse_loss: A result whose retain loss exceeds the original's by more nats per token is collapsed.
        num_examples: Examples of each set per measurement.
    """

    eval_every: int = 10
    target_metric: Literal["loss", "extraction_strength", "exact_memorization", "answer_probability"] = "loss"
    target: float | None = None
    max_utility_drop: float = 5.0
    collapse_loss: float = 1.0
    num_examples: int = 64

    def __post_init__(self) -> None:
        _check_choices(self)
        _check(self.eval_every >= 0, "guards.eval_every", "at least 0", self.eval_every)
        _check(self.max_utility_drop > 0, "guards.max_utility_drop", "positive", self.max_utility_drop)
        _check(self.collapse_loss > 0, "guards.collapse_loss", "positive", self.collapse_loss)
        _check(self.num_examples >= 1, "guards.num_examples", "at least 1", self.num_examples)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlearnConfig:
    """All options of one run."""

    attribution: AttributionConfig = field(default_factory=AttributionConfig)
    neurons: NeuronConfig = field(default_factory=NeuronConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        if self.train.trainable == "everything" and self.train.attention != "full":
            raise ConfigError("train.trainable = 'everything' trains attention in full; set train.attention = 'full'")
        if self.train.attention == "frozen" and self.neurons.control == "none":
            raise ConfigError(
                "neurons.control = 'none' with train.attention = 'frozen' trains nothing; "
                "choose another control or attention = 'full' or 'lora'"
            )

    @property
    def needs_attribution(self) -> bool:
        """Whether step 1 has to run: a random control under `budget` knows its counts without scores."""
        if self.neurons.control in ("none", "all") or self.train.trainable == "everything":
            return False
        return self.neurons.control == "attributed" or self.neurons.select != "budget"

    @property
    def neurons_without_policy(self) -> NeuronConfig:
        """The selection rule alone: no dual policy, no control."""
        return dataclasses.replace(self.neurons, dual="keep", control="attributed")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, the inverse of `from_dict`."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Any]]) -> "UnlearnConfig":
        """Build from nested plain values; unknown sections and options raise ConfigError."""
        sections: dict[str, Any] = {}
        for name, options in values.items():
            section = _SECTIONS.get(name)
            if section is None:
                raise ConfigError(f"unknown section {name!r}; sections are {', '.join(_SECTIONS)}")
            known = {f.name for f in dataclasses.fields(section)}
            unknown = sorted(set(options) - known)
            if unknown:
                raise ConfigError(f"unknown option {name}.{unknown[0]}; options are {', '.join(sorted(known))}")
            sections[name] = section(**options)
        return cls(**sections)

    def with_options(self, options: Mapping[str, Any]) -> "UnlearnConfig":
        """Return a copy with dotted options changed, such as {"train.seed": 1}.

        Text values are converted to the option's type, so a command line can pass them on as they are.

        Raises:
            ConfigError: An unknown section or option, or a value that is not allowed.
        """
        nested = self.to_dict()
        for dotted, value in options.items():
            section, _, name = dotted.partition(".")
            if section not in _SECTIONS or name not in {f.name for f in dataclasses.fields(_SECTIONS[section])}:
                raise ConfigError(f"unknown option {dotted!r}; {_nearest(dotted)}")
            hint = typing.get_type_hints(_SECTIONS[section])[name]
            nested[section][name] = _convert(dotted, value, hint) if isinstance(value, str) else value
        return UnlearnConfig.from_dict(nested)


_SECTIONS: dict[str, Any] = {
    "attribution": AttributionConfig,
    "neurons": NeuronConfig,
    "optimizer": OptimizerConfig,
    "objective": ObjectiveConfig,
    "train": TrainConfig,
    "guards": GuardConfig,
}


def _nearest(dotted: str) -> str:
    """Say which option was probably meant, else which there are."""
    names = {section: sorted(f.name for f in dataclasses.fields(kind)) for section, kind in _SECTIONS.items()}
    section, _, name = dotted.partition(".")
    if near := difflib.get_close_matches(section, names, n=1):
        section = near[0]
    if section not in names:
        return f"write section.option, sections are {', '.join(names)}"
    if near := difflib.get_close_matches(name, names[section], n=1):
        return f"did you mean '{section}.{near[0]}'?"
    return f"options of {section} are {', '.join(names[section])}"


def _convert(name: str, text: str, hint: Any) -> Any:  # noqa: ANN401 - types are values here
    """Turn command-line text into the type of an option."""
    if isinstance(hint, types.UnionType):
        if text.lower() == "none":
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if hint is str or typing.get_origin(hint) is Literal:
        return text
    try:
        if hint is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if typing.get_origin(hint) is tuple:
            return tuple(float(part) for part in text.split(","))
        return hint(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be read from {text!r}: it must be {getattr(hint, '__name__', hint)}"
        ) from error
