# SPDX-License-Identifier: Apache-2.0
"""Step 1: how much each MLP neuron serves the answers of a set, by integrated gradients.

`attribution_score` of neuron k in layer l is beta * mean_j dL(alpha_j * beta)/da, summed over the counted positions of
all examples, where beta is the activation and L the summed negative log-likelihood of the answers. Per layer the scores
sum to L(beta) - L(0) as the number of points grows (completeness); `AttributionScores.residuals` says how closely.
All answer tokens of an example are scaled in one pass rather than as one next-token sample each.
"""

import contextlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from lazyattention.errors import RequestError
from lazyattention.unlearn.architectures import Architecture, DownProjection, architecture_of, base_model_of
from lazyattention.unlearn.batch import IGNORED_LABEL, TokenBatch
from lazyattention.unlearn.config import AttributionConfig, NeuronAxis
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.utils.logging import get_logger

Layers = list[torch.Tensor]

logger = get_logger(__name__)
# Median over layers of the unexplained share of the loss change above which a run is warned about.
_MAX_RESIDUAL = 0.2


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What step 1 will do, known before it starts.

    Attributes:
        num_batches: Batches of both sets.
        num_passes: Forward-and-backward passes over part of the model.
        num_layer_passes: Single layers run forward, backward counted as one more.
        flops: Multiply-adds times two, matrix products of layers and of the vocabulary projection only.
    """

    num_batches: int
    num_passes: int
    num_layer_passes: int
    flops: float


@dataclass(slots=True)
class AttributionScores:
    """Result of step 1, unsigned by `AttributionConfig.sign`.

    Attributes:
        axis: Side of the down-projection.
        forget: float32 `[num_neurons]` per layer, summed over the forget set.
        retain: The same of the retain set, or None when it was not asked for.
        num_forget_tokens: Answer tokens of the forget set.
        num_retain_tokens: Answer tokens of the retain set.
        loss_change: Per layer L(beta) - L(0) on the forget set, nats; empty under "fast" and "joint".
        elapsed_s: Seconds.
    """

    axis: NeuronAxis
    forget: Layers
    retain: Layers | None = None
    num_forget_tokens: int = 0
    num_retain_tokens: int = 0
    loss_change: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def residuals(self) -> list[float]:
        """Per layer, the part of the loss change the scores do not explain: |sum - change| / |change|."""
        return [
            abs(float(score.sum()) - change) / max(abs(change), 1e-12)
            for score, change in zip(self.forget, self.loss_change, strict=bool(self.loss_change))
        ]

    def signed(self, config: AttributionConfig) -> tuple[Layers, Layers | None]:
        """Apply sign and contrast: what `select_neurons` takes for the forget and for the retain set."""
        forget = [_signed(score, config.sign) / max(self.num_forget_tokens, 1) for score in self.forget]
        retain = None
        if self.retain is not None:
            retain = [_signed(score, config.sign) / max(self.num_retain_tokens, 1) for score in self.retain]
        if config.contrast:
            if retain is None:
                raise RequestError("attribution.contrast needs scores of the retain set; give one, attribute again")
            return [f - r for f, r in zip(forget, retain, strict=True)], retain
        return forget, retain

    def save(self, path: Path) -> None:
        """Write as safetensors."""
        tensors = {f"forget.{idx}": score for idx, score in enumerate(self.forget)}
        tensors |= {f"retain.{idx}": score for idx, score in enumerate(self.retain or [])}
        tensors["loss_change"] = torch.tensor(self.loss_change, dtype=torch.float64)
        tensors["num_tokens"] = torch.tensor([self.num_forget_tokens, self.num_retain_tokens])
        tensors["axis_is_out"] = torch.tensor([self.axis == "out"])
        tensors["elapsed_s"] = torch.tensor([self.elapsed_s], dtype=torch.float64)
        save_file(tensors, path)

    @classmethod
    def load(cls, path: Path) -> "AttributionScores":
        """Read what `save` wrote."""
        tensors = load_file(path)
        num_layers = sum(name.startswith("forget.") for name in tensors)
        return cls(
            axis="out" if bool(tensors["axis_is_out"]) else "in",
            forget=[tensors[f"forget.{idx}"] for idx in range(num_layers)],
            retain=[tensors[f"retain.{idx}"] for idx in range(num_layers)] if "retain.0" in tensors else None,
            num_forget_tokens=int(tensors["num_tokens"][0]),
            num_retain_tokens=int(tensors["num_tokens"][1]),
            loss_change=tensors["loss_change"].tolist(),
            elapsed_s=float(tensors["elapsed_s"]),
        )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _signed(score: torch.Tensor, sign: str) -> torch.Tensor:
    if sign == "abs":
        return score.abs()
    return -score if sign == "support" else score.clone()


def path_points(config: AttributionConfig) -> list[tuple[float, float]]:
    """Points alpha on the path from 0 to 1 and their weights, which sum to 1 up to the rule's error."""
    m = config.num_steps
    if config.rule == "right":
        return [(j / m, 1 / m) for j in range(1, m + 1)]
    middles = [(j - 0.5) / m for j in range(1, m + 1)]
    if config.rule == "midpoint":
        return [(s, 1 / m) for s in middles]
    # Midpoints of s with alpha = s**4: a model that normalises the MLP's output changes near alpha = 0 only.
    return [(s**4, 4 * s**3 / m) for s in middles]


def estimate_cost(model: nn.Module, batches: Sequence[TokenBatch], config: AttributionConfig) -> CostEstimate:
    """Count what `attribute` will do on `batches` (both sets together)."""
    architecture = architecture_of(model)
    num_layers, m = architecture.num_layers, config.num_steps
    if config.path == "fast":
        passes_per_batch, layer_passes = 1, 2 * num_layers
    elif config.path == "joint":
        passes_per_batch, layer_passes = m, 2 * m * num_layers + num_layers
    else:
        # Layer l is followed by num_layers - l layers, itself included; one more forward for L(0); one prefix pass.
        suffixes = num_layers * (num_layers + 1) // 2
        passes_per_batch, layer_passes = m * num_layers, (2 * m + 1) * suffixes + num_layers
    layer_params = sum(p.numel() for p in architecture.layers[0].parameters() if p.dim() > 1)
    config_of_model: Any = base_model_of(model).config
    head_params = config_of_model.vocab_size * config_of_model.hidden_size
    tokens = sum(batch.input_ids.numel() for batch in batches)
    answer_tokens = sum(batch.num_answer_tokens for batch in batches)
    flops = 2.0 * layer_params * tokens * layer_passes + 4.0 * head_params * answer_tokens * passes_per_batch
    return CostEstimate(
        len(batches), passes_per_batch * len(batches), layer_passes * len(batches), flops if batches else 0.0
    )


def attribute(
    model: nn.Module,
    forget: Sequence[TokenBatch],
    retain: Sequence[TokenBatch] | None,
    config: AttributionConfig,
    *,
    progress: Progress | None = None,
) -> AttributionScores:
    """Score every neuron on the forget set and, if given, on the retain set.

    The model is left as it was: mode, hooks and `requires_grad` included.

    Args:
        model: Causal transformers model or a PEFT or DDP wrapper of one.
        forget: Batches on the model's device.
        retain: The same of the retain set; needed for contrast and for dual policies "drop" and "only".
        config: Options A1 to A5.
        progress: Shows one bar per set; None shows nothing.

    Raises:
        UnsupportedError: The architecture is not known.
        RequestError: No batch has an answer token.
    """
    if not any(batch.num_answer_tokens for batch in forget):
        raise RequestError("the forget set has no answer token to attribute; check the template and max_len")
    architecture = architecture_of(model)
    start = time.monotonic()
    with _frozen_in_eval_mode(model):
        scores, changes = _score_set(model, architecture, forget, config, progress, "forget set")
        result = AttributionScores(config.neuron_axis, scores, loss_change=changes)
        result.num_forget_tokens = sum(batch.num_answer_tokens for batch in forget)
        if retain:
            result.retain, _ = _score_set(model, architecture, retain, config, progress, "retain set")
            result.num_retain_tokens = sum(batch.num_answer_tokens for batch in retain)
    result.elapsed_s = time.monotonic() - start
    unexplained = _median(result.residuals)
    if unexplained > _MAX_RESIDUAL:
        logger.warning(
            "integrated gradients leave %.0f %% of the loss change of half the layers unexplained with "
            "attribution.num_steps = %d; raise it or set attribution.rule = 'power'",
            100 * unexplained,
            config.num_steps,
        )
    return result


def _score_set(
    model: nn.Module,
    architecture: Architecture,
    batches: Sequence[TokenBatch],
    config: AttributionConfig,
    progress: Progress | None,
    label: str,
) -> tuple[Layers, list[float]]:
    axis = config.neuron_axis
    totals = [torch.zeros(d.num_neurons(axis), dtype=torch.float32) for d in architecture.down]
    changes = [0.0] * architecture.num_layers if config.path == "layerwise" else []
    steps_per_batch = architecture.num_layers if config.path == "layerwise" else 1
    shown = progress or Progress(is_enabled=False)
    with shown.task(f"attribution, {label}", len(batches) * steps_per_batch) as advance:
        for batch in batches:
            run = _Run(model, architecture, batch, config)
            if config.path == "layerwise":
                run.layerwise(totals, changes, advance)
                continue
            if config.path == "fast":
                run.fast(totals)
            else:
                run.joint(totals)
            advance(1)
    return totals, changes


class _Run:
    """Attribution passes over one batch."""

    def __init__(
        self, model: nn.Module, architecture: Architecture, batch: TokenBatch, config: AttributionConfig
    ) -> None:
        self._model, self._architecture, self._batch, self._config = model, architecture, batch, config
        # Bool, one flag per token of the batch.
        self._counted = batch.positions(config.positions)
        self._points = path_points(config)
        # Logits are computed at positions that predict an answer token somewhere in the batch.
        self._keep = batch.positions("answer").any(dim=0).nonzero().flatten()
        forward = inspect.signature(base_model_of(model).forward).parameters
        self._extra = {"logits_to_keep": self._keep} if "logits_to_keep" in forward else {}

    def loss(self) -> torch.Tensor:
        """Summed negative log-likelihood of the batch's answers, nats."""
        batch = self._batch
        logits = self._model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **self._extra
        ).logits
        if not self._extra:
            logits = logits[:, self._keep]
        targets = batch.labels[:, self._keep + 1]
        return functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )

    def layerwise(self, totals: Layers, changes: list[float], advance: Callable[[int], None]) -> None:
        """Scale one layer at a time; layers before it are not run again."""
        entries: list[_LayerEntry] = []
        with _recorded_entries(self._architecture, entries):
            betas, full_loss = self._betas()
        for idx, (projection, beta) in enumerate(zip(self._architecture.down, betas, strict=True)):
            with _resumed_at(self._architecture, idx, entries):
                mean_grad = self._integrate([projection], [beta])[0]
                totals[idx] += self._reduce(beta.float() * mean_grad)
                with torch.no_grad(), self._replaced([projection], [beta], [torch.zeros_like(beta)]):
                    changes[idx] += full_loss - float(self.loss())
            advance(1)

    def joint(self, totals: Layers) -> None:
        """Scale all layers together, each along the line from 0 to its own activation."""
        betas, _ = self._betas()
        for total, beta, mean_grad in zip(totals, betas, self._integrate(self._architecture.down, betas), strict=True):
            total += self._reduce(beta.float() * mean_grad)

    def fast(self, totals: Layers) -> None:
        """Gradient times activation, all layers in one pass: another score, not an approximation of the others."""
        leaves: list[tuple[torch.Tensor, torch.Tensor]] = []

        def add_leaf(activation: torch.Tensor) -> torch.Tensor:
            leaf = torch.zeros_like(activation, requires_grad=True)
            leaves.append((activation.detach(), leaf))
            return activation + leaf

        with contextlib.ExitStack() as stack, torch.enable_grad():
            for projection in self._architecture.down:
                stack.enter_context(_hooked(projection, self._config.neuron_axis, add_leaf))
            torch.autograd.backward(self.loss())
        for total, (beta, leaf) in zip(totals, leaves, strict=True):
            assert leaf.grad is not None
            total += self._reduce(beta.float() * leaf.grad.float())

    def _integrate(self, projections: Sequence[DownProjection], betas: Sequence[torch.Tensor]) -> Layers:
        """Mean gradient over the path for each projection, float32 in the activation's shape."""
        sums = [torch.zeros_like(beta, dtype=torch.float32) for beta in betas]
        for alpha, weight in self._points:
            leaves = [(alpha * beta).requires_grad_() for beta in betas]
            with torch.enable_grad(), self._replaced(projections, betas, leaves):
                torch.autograd.backward(self.loss())
            for total, leaf in zip(sums, leaves, strict=True):
                assert leaf.grad is not None
                total.add_(leaf.grad.float(), alpha=weight)
        return sums

    def _betas(self) -> tuple[Layers, float]:
        """Activations of all layers of the unchanged model, and its loss."""
        betas: Layers = []

        def record(activation: torch.Tensor) -> torch.Tensor:
            betas.append(activation.detach())
            return activation

        with contextlib.ExitStack() as stack, torch.no_grad():
            for projection in self._architecture.down:
                stack.enter_context(_hooked(projection, self._config.neuron_axis, record))
            loss = float(self.loss())
        return betas, loss

    @contextlib.contextmanager
    def _replaced(
        self, projections: Sequence[DownProjection], betas: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Put `values` in place of the activations at counted positions, `betas` elsewhere."""
        with contextlib.ExitStack() as stack:
            for projection, beta, value in zip(projections, betas, values, strict=True):
                replacement = torch.where(self._broadcast(beta), value, beta)
                stack.enter_context(_hooked(projection, self._config.neuron_axis, _always(replacement)))
            yield

    def _broadcast(self, activation: torch.Tensor) -> torch.Tensor:
        # OPT flattens batch and sequence before its MLP.
        return self._counted.reshape(*activation.shape[:-1], 1)

    def _reduce(self, score: torch.Tensor) -> torch.Tensor:
        """Sum a score over counted positions: float32 `[num_neurons]` on the CPU."""
        return (score * self._broadcast(score)).flatten(0, -2).sum(dim=0).float().cpu()


def _always(value: Any) -> Callable[..., Any]:  # noqa: ANN401 - stands in for functions of any signature
    return lambda *args, **kwargs: value


@contextlib.contextmanager
def _hooked(
    projection: DownProjection, axis: NeuronAxis, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Pass the activation of one down-projection (its input or its output) through `change`."""
    if axis == "in":
        handle = projection.module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    else:
        handle = projection.module.register_forward_hook(lambda _, args, output: change(output))
    try:
        yield
    finally:
        handle.remove()


@dataclass(slots=True)
class _LayerEntry:
    """What enters a layer, and whether its forward returns a tuple."""

    hidden: torch.Tensor
    returns_tuple: bool = False


@contextlib.contextmanager
def _recorded_entries(architecture: Architecture, entries: list[_LayerEntry]) -> Iterator[None]:
    """Append one entry per layer as the model runs."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entries.append(_LayerEntry((args[0] if args else kwargs["hidden_states"]).detach()))

    def after(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
        entries[-1].returns_tuple = isinstance(output, tuple)

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in architecture.layers]
    handles += [layer.register_forward_hook(after) for layer in architecture.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _resumed_at(architecture: Architecture, layer_idx: int, entries: Sequence[_LayerEntry]) -> Iterator[None]:
    """Make layers before `layer_idx` return at once, so that what was recorded enters that layer.

    The model's own forward does all the rest: masks, rotary tables, final norm, vocabulary projection.
    """
    hidden = entries[layer_idx].hidden
    originals: list[tuple[Any, Any]] = []
    for layer, entry in zip(architecture.layers[:layer_idx], entries, strict=False):
        # accelerate, too, puts a forward on the instance: put back what was there.
        originals.append((layer, vars(layer).get("forward")))
        layer.forward = _always((hidden,) if entry.returns_tuple else hidden)
    try:
        yield
    finally:
        for layer, forward in originals:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


@contextlib.contextmanager
def _frozen_in_eval_mode(model: nn.Module) -> Iterator[None]:
    """No gradients for weights, no dropout; both restored afterwards."""
    was_training = model.training
    required = [(param, param.requires_grad) for param in model.parameters()]
    model.eval()
    for param, _ in required:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param, flag in required:
            param.requires_grad_(flag)
        model.train(was_training)
