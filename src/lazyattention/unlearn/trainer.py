# SPDX-License-Identifier: Apache-2.0
"""Step 2 on transformers' Trainer: pairs of forget and retain examples, a masked optimiser, guards and telemetry.

Works under `accelerate launch` or torchrun on several GPUs: gradients and curvature are averaged over processes, the
first process measures and all follow its decision.
"""

import contextlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from lazyattention.unlearn.adamw import MaskedAdamW
from lazyattention.unlearn.batch import TokenBatch, logits_of, pad_right
from lazyattention.unlearn.config import UnlearnConfig
from lazyattention.unlearn.curvature import gauss_newton_bartlett
from lazyattention.unlearn.data import EncodedExample
from lazyattention.unlearn.guards import Guard, Measurement
from lazyattention.unlearn.masked_step import MaskedOptimizer, clip_gradients
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.unlearn.metrics.score import evaluating
from lazyattention.unlearn.neuron_mask import Selection
from lazyattention.unlearn.objectives import OBJECTIVES, Objective, ObjectiveInputs, compute_terms
from lazyattention.unlearn.sophia import MaskedSophia
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

# Above this share of clipped entries over a whole run, second order has become sign-momentum.
_MAX_CLIP_FRACTION = 0.98
_TRAINABLE_FILE, _STATE_FILE = "trainable.safetensors", "unlearn_state.json"


@dataclass(frozen=True, slots=True)
class TrainingSets:
    """Encoded examples of one run.

    Attributes:
        forget: What the forget term sees: question and answer, or question and "I don't know".
        retain: What the retain term sees; empty when the objective has none.
        pad_id: Any token id; padding is masked.
    """

    forget: Sequence[EncodedExample]
    retain: Sequence[EncodedExample]
    pad_id: int


class PairDataset(Dataset[tuple[EncodedExample, EncodedExample | None]]):
    """All pairs of a run in order: each epoch a new permutation of the forget set beside a walk through the retain set.

    The whole order is fixed by the seed, so a resumed run sees what an uninterrupted one does.
    """

    def __init__(self, sets: TrainingSets, num_epochs: int, seed: int) -> None:
        rng = random.Random(seed)
        self._rows: list[tuple[EncodedExample, EncodedExample | None]] = []
        retain: list[EncodedExample] = []
        for _ in range(num_epochs):
            for example in rng.sample(list(sets.forget), len(sets.forget)):
                if sets.retain and not retain:
                    retain = rng.sample(list(sets.retain), len(sets.retain))
                self._rows.append((example, retain.pop() if retain else None))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[EncodedExample, EncodedExample | None]:
        return self._rows[index]


@dataclass(frozen=True, slots=True)
class _PairCollator:
    """Pads forget rows, then retain rows, into one batch: one forward pass serves both terms."""

    pad_id: int

    def __call__(self, rows: Sequence[tuple[EncodedExample, EncodedExample | None]]) -> dict[str, Any]:
        ordered = [forget for forget, _ in rows] + [retain for _, retain in rows if retain is not None]
        batch = pad_right([(row.input_ids, row.labels) for row in ordered], self.pad_id)
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "labels": batch.labels,
            "num_forget": len(rows),
        }


class ReferenceModel:
    """The original model, at the cost of the trained parameters only: the frozen ones are shared."""

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._values = {name: param.detach().clone() for name, param in params.items()}

    def logits(self, batch: TokenBatch) -> torch.Tensor:
        """Logits of the original model, without graph or dropout."""
        with evaluating(self._model):
            output = torch.func.functional_call(
                self._model,
                self._values,
                (),
                {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False},
            )
        logits = output.logits
        assert isinstance(logits, torch.Tensor)
        return logits


@dataclass(slots=True)
class Telemetry:
    """What happened at each step; tensors until read, so that a GPU is not waited for.

    Attributes:
        rows: "step", "loss", "forget_loss", "retain_loss", "grad_norm", "lr", "clip_fraction".
    """

    rows: list[dict[str, Any]] = field(default_factory=list)

    def plain(self) -> list[dict[str, float | int | None]]:
        """The rows as numbers; None where a value does not exist or is not finite."""
        return [{key: _number(value) for key, value in row.items()} for row in self.rows]

    @property
    def mean_clip_fraction(self) -> float | None:
        values = [row["clip_fraction"] for row in self.rows if row.get("clip_fraction") is not None]
        return sum(values) / len(values) if values else None


def _number(value: Any) -> float | int | None:  # noqa: ANN401 - numbers and tensors
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class UnlearnTrainer(Trainer):
    """Trainer whose loss is an unlearning objective and whose optimiser moves selected weights only."""

    def __init__(
        self,
        model: PreTrainedModel,
        sets: TrainingSets,
        config: UnlearnConfig,
        guard: Guard,
        *,
        output_dir: Path,
        progress: Progress | None = None,
    ) -> None:
        self.unlearn_config = config
        self.guard_model = model
        self.guard = guard
        self.sets = sets
        self.telemetry = Telemetry()
        self._objective: Objective = OBJECTIVES[config.objective.name]
        params = guard.snapshot.params
        # Named before super().__init__, which asks for the optimiser.
        self.masked_optimizer = make_optimizer(model, params, guard.snapshot.selections, config)
        dataset = PairDataset(sets, config.train.num_epochs, config.train.seed)
        super().__init__(
            model=model,
            args=_training_arguments(model, config, output_dir, len(dataset)),
            train_dataset=dataset,
            data_collator=_PairCollator(sets.pad_id),
            optimizers=(self.masked_optimizer, None),
            callbacks=[_StepCallback(self), _ProgressCallback(progress)],
        )
        # Our loss is a mean over the micro-batch: the Trainer has to divide by the number of micro-batches.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        guard.measure = self._measured_once(guard.measure)
        kind = self._objective.retain_kind(config.objective)
        needs_reference = self._objective.needs_ref_forget or kind == "kl"
        self._reference = ReferenceModel(model, params) if needs_reference else None
        self._uses_retain = kind != "none"

    def run(self, resume_from: str | None = None) -> None:
        """Train until the schedule or a guard ends it; the model holds the accepted weights afterwards."""
        if resume_from is None:
            self.guard.start()
            if self.guard.target_reached(self.guard.before):
                logger.warning(
                    "the original model is at the target already (%s %.3g): it may never have known what is to be "
                    "forgotten; look at the answers before, or set guards.target",
                    self.guard.config.target_metric,
                    self.guard.target,
                )
        self.train(resume_from_checkpoint=resume_from)
        self.guard.finish(self.state.global_step)
        self.guard_model.eval()
        fraction = self.telemetry.mean_clip_fraction
        if fraction is not None and fraction > _MAX_CLIP_FRACTION:
            logger.warning(
                "%.1f %% of the entries were clipped at the mean step: this was sign-momentum, not second order; "
                "raise optimizer.rho (or optimizer.curvature_factor) until 50 to 90 %% are clipped",
                100 * fraction,
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Objective of one micro-batch; its terms go to the telemetry."""
        batch = TokenBatch(inputs["input_ids"], inputs["attention_mask"], inputs["labels"])
        n = int(inputs["num_forget"])
        logits = logits_of(model, batch)
        reference = self._reference.logits(batch) if self._reference is not None else None
        terms = compute_terms(
            self._objective,
            ObjectiveInputs(
                forget_logits=logits[:n],
                forget_labels=batch.labels[:n],
                retain_logits=logits[n:] if self._uses_retain else None,
                retain_labels=batch.labels[n:] if self._uses_retain else None,
                ref_forget_logits=reference[:n] if reference is not None else None,
                ref_retain_logits=reference[n:] if reference is not None else None,
            ),
            self.unlearn_config.objective,
        )
        self.telemetry.rows.append(
            {
                "step": self.state.global_step + 1,
                "loss": terms.loss.detach(),
                "forget_loss": terms.forget_loss.detach(),
                "retain_loss": terms.retain_loss.detach() if terms.retain_loss is not None else None,
            }
        )
        return terms.loss

    def update_curvature(self) -> None:
        """Estimate the curvature on a few examples, before the step's own gradients exist."""
        config = self.unlearn_config
        seed = (config.train.seed * 1_000_003 + self.state.global_step) * 1_009 + self.args.process_index
        rng = random.Random(seed)
        chosen: list[EncodedExample] = []
        for name, examples in (("forget", self.sets.forget), ("retain", self.sets.retain)):
            if config.optimizer.curvature_set in (name, "both") and examples:
                chosen += rng.choices(list(examples), k=config.train.batch_size)
        batch = pad_right([(row.input_ids, row.labels) for row in chosen], self.sets.pad_id).to(self.args.device)
        model = self.model_wrapped
        with evaluating_with_graph(model):
            num_predictions = gauss_newton_bartlett(
                lambda b: logits_of(model, b), batch, torch.Generator().manual_seed(seed)
            )
        total = self.accelerator.reduce(torch.tensor(num_predictions, device=self.args.device), reduction="sum")
        assert isinstance(self.masked_optimizer, MaskedSophia)
        self.masked_optimizer.update_curvature(scale=float(total))
        model.zero_grad()

    def _measured_once(self, measure: Any) -> Any:  # noqa: ANN401 - a callable of the guard's
        """Let the first process measure and give every process its result, so that all decide alike."""

        def measured() -> Measurement:
            box = [measure() if self.accelerator.is_main_process else None]
            broadcast_object_list(box)
            result: Measurement = box[0]  # type: ignore[assignment]
            return result

        return measured

    def _get_train_sampler(self, *args: object, **kwargs: object) -> SequentialSampler:
        assert self.train_dataset is not None
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ANN401
        """Write a checkpoint's weights: the trainable entries only, and what the guard knows."""
        assert output_dir is not None
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.guard.snapshot.capture(), folder / _TRAINABLE_FILE)
        save_file(dict(self.guard.initial), folder / f"initial_{_TRAINABLE_FILE}")
        state = {"history": self.guard.history, "steps": self.telemetry.plain()}
        (folder / _STATE_FILE).write_text(json.dumps(state))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        state = json.loads((folder / _STATE_FILE).read_text())
        self.guard._initial = load_file(folder / f"initial_{_TRAINABLE_FILE}")
        self.guard.snapshot.restore(load_file(folder / _TRAINABLE_FILE))
        self.guard.history, self.telemetry.rows = state["history"], state["steps"]
        self.guard.start()


@contextlib.contextmanager
def evaluating_with_graph(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) with gradients; every module's mode is restored."""
    with evaluating(model), torch.enable_grad():
        yield


def make_optimizer(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    selections: Mapping[nn.Parameter, Selection],
    config: UnlearnConfig,
) -> MaskedOptimizer:
    """Build the optimiser; biases (one-dimensional parameters) do not decay."""
    matrices = [param for param in params.values() if param.dim() > 1]
    vectors = [param for param in params.values() if param.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": config.optimizer.weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    kind = MaskedSophia if config.optimizer.name == "sophia" else MaskedAdamW
    return kind(groups, config.optimizer, selections)


def _training_arguments(
    model: PreTrainedModel, config: UnlearnConfig, output_dir: Path, num_pairs: int
) -> TrainingArguments:
    train = config.train
    if train.gradient_checkpointing:
        # Frozen embeddings give inputs without gradient: under reentrant checkpointing, which a model may insist on,
        # its layers would train nothing.
        model.enable_input_require_grads()
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        num_train_epochs=1,
        per_device_train_batch_size=train.batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        learning_rate=config.optimizer.lr,
        lr_scheduler_type=train.schedule,
        # Clipping is ours: it has to leave frozen entries out.
        max_grad_norm=0.0,
        **_checkpointing_arguments(train.gradient_checkpointing),
        save_strategy="steps" if train.save_steps else "no",
        save_steps=train.save_steps or 500,
        save_total_limit=2,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=False,
        seed=train.seed,
        data_seed=train.seed,
        use_cpu=next(model.parameters()).device.type == "cpu",
    )
    if arguments.world_size == 1 and arguments.n_gpu > 1:
        # One process uses one GPU; several GPUs are used by several processes.
        arguments._n_gpu = 1
    per_step = train.batch_size * train.gradient_accumulation_steps * arguments.world_size
    arguments.warmup_steps = int(train.warmup_ratio * math.ceil(num_pairs / per_step))
    return arguments


def _checkpointing_arguments(is_wanted: bool) -> dict[str, Any]:
    """Name the options as this transformers does: "activation" replaces "gradient"."""
    fields = TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}} if is_wanted else {}


class _StepCallback(TrainerCallback):
    """Curvature before a step, clipping before the update, guards after it."""

    def __init__(self, trainer: UnlearnTrainer) -> None:
        self._trainer = trainer
        self._sophia = config if (config := trainer.unlearn_config.optimizer).name == "sophia" else None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        sophia = self._sophia
        if sophia and sophia.estimator == "gnb" and state.global_step % sophia.hessian_interval == 0:
            self._trainer.update_curvature()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        trainer, guard = self._trainer, self._trainer.guard
        options = trainer.unlearn_config.optimizer
        params = list(guard.snapshot.params.values())
        norm = clip_gradients(params, guard.snapshot.selections, options.max_grad_norm, options.clip_over)
        trainer.telemetry.rows[-1] |= {"grad_norm": norm, "lr": trainer.masked_optimizer.param_groups[0]["lr"]}
        if not math.isfinite(norm):
            # Without gradients the update skips every parameter.
            for param in params:
                param.grad = None
            guard.fail("not finite")
            control.should_training_stop = True
        elif isinstance(trainer.masked_optimizer, MaskedSophia) and options.estimator == "squared_grad":
            trainer.masked_optimizer.update_curvature()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        trainer, guard = self._trainer, self._trainer.guard
        if isinstance(trainer.masked_optimizer, MaskedSophia):
            trainer.telemetry.rows[-1]["clip_fraction"] = trainer.masked_optimizer.clip_fraction
        every = guard.config.eval_every
        if every and state.global_step % every == 0 and guard.stop_reason is None:
            guard.check(state.global_step)
        if guard.stop_reason is not None:
            control.should_training_stop = True


class _ProgressCallback(TrainerCallback):
    """One bar over the steps of the run."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress or Progress(is_enabled=False)
        self._stack = contextlib.ExitStack()
        self._advance: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.is_local_process_zero:
            self._advance = self._stack.enter_context(self._progress.task("unlearning", state.max_steps))
            self._advance(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._advance is not None:
            self._advance(1)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._stack.close()
