# SPDX-License-Identifier: Apache-2.0
"""The training loop: student under the chunk mask, teacher the same model with full attention and its adapter off.

The teacher may read fewer documents (`AdaptConfig.teacher_documents`). A step is `batch_size` prompts and some plain text,
packed into forward passes of at most `micro_batch_tokens` tokens. Every `eval_steps` the held-out loss is measured, the best
adapter kept and a checkpoint written; a run that is started again goes on from it.
"""

import contextlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lazyattention.adapt.config import AdaptConfig
from lazyattention.adapt.objectives import OBJECTIVES
from lazyattention.adapt.rows import TrainingBatch, TrainingRow, make_batch
from lazyattention.adapt.samples import Sample
from lazyattention.errors import ConfigError, LazyAttentionError
from lazyattention.ops.rotary import LayerRotary
from lazyattention.quality.output import refuse_difference
from lazyattention.reuse import Chunking
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

STUDENT_METHOD, FULL_METHOD = "rotate_query", "full_recompute"
_CHECKPOINT_NAME = "checkpoint.pt"
_NUM_PLAIN_HELD_OUT = 32
# So many skipped steps in a row mean that it will not get better.
_MAX_SKIPPED_IN_A_ROW = 10


@dataclass(slots=True)
class TrainingLog:
    """What happened, kept in the checkpoint and the report.

    Attributes:
        num_steps: Optimizer steps taken, skipped ones included.
        num_prompts: Prompts trained on, repetitions included.
        num_skipped: Steps skipped because a gradient was not finite.
        train_s: Seconds of training, measurements left out.
        evaluations: `{step, chunk, full, plain}`: held-out losses under the chunk mask, with full attention, and on plain
            text (where there is some).
        losses: Mean training loss of each step.
        best_step: Step of the lowest held-out loss.
        stopped: Why training ended.
    """

    num_steps: int = 0
    num_prompts: int = 0
    num_skipped: int = 0
    train_s: float = 0.0
    evaluations: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best_step: int = 0
    stopped: str = ""


class Trainer:
    """Trains one adapter. `model` is a PEFT model whose attention is `lazyattention_training`."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a PEFT model; peft is imported by the workflow only
        rotaries: Sequence[LayerRotary],
        samples: Sequence[Sample],
        config: AdaptConfig,
        folder: Path,
        *,
        chunking: Chunking | None = None,
        pad_token_id: int = 0,
        plain: Sequence[Sample] = (),
    ) -> None:
        """Split samples and find what an earlier run left in `folder`.

        Raises:
            ConfigError: There are too few samples, or the folder's checkpoint is of another run.
        """
        self.model, self.rotaries, self.config, self.folder = model, rotaries, config, folder
        self.objective = OBJECTIVES[config.objective]
        self.device = next(model.parameters()).device
        self._chunking = chunking
        self._pad_token_id = pad_token_id
        self.training, self.held_out = split_samples(samples, config)
        num_held_out = min(_NUM_PLAIN_HELD_OUT, len(plain) // 4)
        self.plain_held_out, self.plain = plain[:num_held_out], plain[num_held_out:]
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(self.params, lr=config.learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
        self.log = TrainingLog()
        self.best: list[torch.Tensor] = [param.detach().clone() for param in self.params]
        self._resume()

    def train(self, on_step: Callable[[TrainingLog], None] | None = None) -> TrainingLog:
        """Train until a limit or until the held-out loss stops falling; the model then holds the best adapter.

        Raises:
            LazyAttentionError: Gradients stay without finite values.
        """
        if not self.log.evaluations:
            self._evaluate()
        num_skipped_in_a_row = 0
        while not self.log.stopped:
            started_s = time.perf_counter()
            was_finite = self._step()
            self.log.train_s += time.perf_counter() - started_s
            num_skipped_in_a_row = 0 if was_finite else num_skipped_in_a_row + 1
            if num_skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
                raise LazyAttentionError(
                    f"{num_skipped_in_a_row} steps in a row had gradients that are not finite; lower learning_rate, or "
                    "load the model with dtype='float32'"
                )
            if on_step is not None:
                on_step(self.log)
            is_last = self.progress >= 1.0
            if is_last or self.log.num_steps % self.config.eval_steps == 0:
                self._evaluate()
                self.log.stopped = self._why_stop(is_last)
                self._save()
        with torch.no_grad():
            for param, best in zip(self.params, self.best, strict=True):
                param.copy_(best)
        return self.log

    @property
    def progress(self) -> float:
        """Share of the budget that is used: steps or time, whichever is further."""
        limit_s = math.inf if self.config.max_minutes is None else 60 * self.config.max_minutes
        return max(self.log.num_steps / self.config.max_steps, self.log.train_s / limit_s)

    def held_out_loss(self, method: str, *, is_plain: bool = False) -> float:
        """Mean loss over held-out prompts (or plain text), question tokens left out, under the mask of a method."""
        rows = [self._row(sample, method) for sample in (self.plain_held_out if is_plain else self.held_out)]
        losses: list[float] = []
        with torch.no_grad():
            for part in cut_by_tokens(rows, self.config.micro_batch_tokens):
                losses += self._losses(part, question_weight=0.0).tolist()
        return sum(losses) / len(losses)

    # One step --------------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Take one optimizer step; False if it was skipped."""
        lr = self.config.learning_rate * min(1.0, (self.log.num_steps + 1) / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * max(0.05, 1.0 - self.progress)
        prompts = self._rows_of_step(self.log.num_steps)
        rows = [*prompts, *self._plain_rows_of_step(self.log.num_steps)]
        total = 0.0
        for part in cut_by_tokens(rows, self.config.micro_batch_tokens):
            loss = self._losses(part, question_weight=self.config.question_weight).sum() / len(rows)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        is_finite = bool(torch.isfinite(norm)) and math.isfinite(total)
        if is_finite:
            self.optimizer.step()
        else:
            self.log.num_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.log.num_steps += 1
        self.log.num_prompts += len(prompts)
        self.log.losses.append(total)
        return is_finite

    def _losses(self, rows: Sequence[TrainingRow], *, question_weight: float) -> torch.Tensor:
        batch = make_batch(rows, self.rotaries, pad_token_id=self._pad_token_id, device=self.device)
        teacher = None
        if self.objective.needs_teacher:
            full = [TrainingRow.of(row.teacher_layout, row.answer, FULL_METHOD) for row in rows]
            seen = make_batch(full, self.rotaries, pad_token_id=self._pad_token_id, device=self.device)
            with torch.no_grad(), self.model.disable_adapter():
                teacher = self._logits(seen)
        with self._autocast():
            student = self._logits(batch)
        return self.objective.loss(student, teacher, batch, question_weight)

    def _logits(self, batch: TrainingBatch) -> torch.Tensor:
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.visibility.positions[None],
            use_cache=False,
            chunk_visibility=batch.visibility,
            logits_to_keep=batch.kept,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        """The adapter's weights are float32 beside a 16-bit model."""
        dtype = self.model.get_base_model().dtype
        if dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(self.device.type, dtype=dtype):
                yield
        else:
            yield

    def _rows_of_step(self, step: int) -> list[TrainingRow]:
        """Which prompts a step takes: a function of step and seed alone, so that a resumed run goes on as it would have."""
        size = min(self.config.batch_size, len(self.training))
        per_epoch = len(self.training) // size
        epoch, index = divmod(step, per_epoch)
        order = random.Random(f"{self.config.seed} {epoch}").sample(range(len(self.training)), len(self.training))
        full = random.Random(f"full {self.config.seed} {step}")
        return [
            self._row(self.training[place], FULL_METHOD if full.random() < self.config.full_share else STUDENT_METHOD)
            for place in order[index * size : (index + 1) * size]
        ]

    def _plain_rows_of_step(self, step: int) -> list[TrainingRow]:
        """Return the step's plain text: one after the other, again from the first when all were there."""
        if not self.plain or not self.objective.needs_teacher:
            return []
        share = self.config.plain_share * min(self.config.batch_size, len(self.training))
        # As many as the share makes in the long run.
        return [
            self._row(self.plain[number % len(self.plain)], FULL_METHOD)
            for number in range(int(step * share), int((step + 1) * share))
        ]

    def _row(self, sample: Sample, method: str) -> TrainingRow:
        # Full attention is that of ordinary prompts, whatever the options.
        chunking = self._chunking if method == STUDENT_METHOD else None
        taught = sample.layout if method == FULL_METHOD and self.config.keep_full else sample.teacher_layout
        return TrainingRow.of(sample.layout, sample.answer, method, chunking, teacher_layout=taught)

    # Measuring, stopping, resuming -----------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        found = {"chunk": self.held_out_loss(STUDENT_METHOD), "full": self.held_out_loss(FULL_METHOD)}
        if self.plain_held_out and self.objective.needs_teacher:
            found["plain"] = self.held_out_loss(FULL_METHOD, is_plain=True)
        earlier = [evaluation["chunk"] for evaluation in self.log.evaluations]
        self.log.evaluations.append({"step": float(self.log.num_steps), **found})
        if not earlier or found["chunk"] < min(earlier):
            self.log.best_step = self.log.num_steps
            self.best = [param.detach().clone() for param in self.params]
        said = ", ".join(f"{name} {loss:.4f}" for name, loss in found.items())
        logger.info("step %d: held-out losses: %s", self.log.num_steps, said)

    def _why_stop(self, is_last: bool) -> str:
        since_best = sum(evaluation["step"] > self.log.best_step for evaluation in self.log.evaluations)
        if since_best >= self.config.patience:
            return f"no improvement in {since_best} measurements"
        if not is_last:
            return ""
        return "max_steps" if self.log.num_steps >= self.config.max_steps else "max_minutes"

    def _save(self) -> None:
        state = {
            "config": asdict(self.config),
            "log": asdict(self.log),
            "params": [param.detach().cpu() for param in self.params],
            "best": [param.cpu() for param in self.best],
            "optimizer": self.optimizer.state_dict(),
        }
        new = self.folder / f"{_CHECKPOINT_NAME}.new"
        torch.save(state, new)
        new.replace(self.folder / _CHECKPOINT_NAME)

    def _resume(self) -> None:
        path = self.folder / _CHECKPOINT_NAME
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        # A longer budget may be given to a run that ended; everything else must be as it was.
        free = ("max_steps", "max_minutes", "patience", "micro_batch_tokens", "gradient_checkpointing")
        known, wanted = (
            {name: value for name, value in config.items() if name not in free}
            for config in (state["config"], asdict(self.config))
        )
        refuse_difference(path, known, wanted)
        self.log = TrainingLog(**state["log"])
        if self.log.stopped in ("max_steps", "max_minutes") and self.progress < 1.0:
            self.log.stopped = ""
        with torch.no_grad():
            for param, saved in zip(self.params, state["params"], strict=True):
                param.copy_(saved)
        self.best = [saved.to(self.device) for saved in state["best"]]
        self.optimizer.load_state_dict(state["optimizer"])
        logger.info("going on from step %d", self.log.num_steps)


def split_samples(samples: Sequence[Sample], config: AdaptConfig) -> tuple[list[Sample], list[Sample]]:
    """Return (training, held-out) samples; at most a quarter is held out, and no prompt is in both.

    Raises:
        ConfigError: There are fewer than 4.
    """
    if len(samples) < 4:
        raise ConfigError(f"there are {len(samples)} prompts to learn from; at least 4 are needed; give more documents")
    order = random.Random(f"split {config.seed}").sample(range(len(samples)), len(samples))
    num_held_out = max(1, min(config.held_out, len(samples) // 4))
    held_out = [samples[place] for place in order[:num_held_out]]
    known = {tuple(sample.layout.token_ids) for sample in held_out}
    training = [samples[place] for place in order[num_held_out:]]
    return [sample for sample in training if tuple(sample.layout.token_ids) not in known], held_out


def cut_by_tokens(rows: Sequence[TrainingRow], limit: int) -> list[list[TrainingRow]]:
    """Cut rows, in order, into parts of at most `limit` tokens (a part has at least one row)."""
    parts: list[list[TrainingRow]] = []
    num_tokens = 0
    for row in rows:
        num_tokens += row.num_tokens
        if not parts or num_tokens > limit:
            parts.append([])
            num_tokens = row.num_tokens
        parts[-1].append(row)
    return parts


def write_log(log: TrainingLog, path: Path, **more: Any) -> None:  # noqa: ANN401 - JSON values
    """Write the log and what else is known about the run as JSON."""
    path.write_text(json.dumps({**asdict(log), **more}, indent=2) + "\n", encoding="utf-8")
