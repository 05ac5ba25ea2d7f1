# SPDX-License-Identifier: Apache-2.0
"""Options of adapting: what is learnt, from what, for how long."""

from dataclasses import dataclass, field, fields

from lazyattention.config import ChunkOptions
from lazyattention.errors import ConfigError

TEACHER_DOCUMENTS = ("gold", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptConfig:
    """How the adapter is trained.

    Attributes:
        objective: "distill" (the model's own full-attention answers, no labels) or "labels" (gold answers).
        teacher_documents: What the teacher reads: "gold" (of each prompt, only the documents that the question is about,
            where they are known; of questions that the model wrote itself they are) or "all" (distill only).
        chunk: How documents are encoded, placed and looked at; the engine's options, for which the adapter is made.
        rank: Of the LoRA matrices.
        alpha: LoRA's scale is alpha / rank.
        learning_rate: At its highest, after warm-up; falls linearly.
        batch_size: Prompts per optimizer step.
        micro_batch_tokens: Tokens per forward pass at most; bounds memory. One prompt always goes.
        question_weight: Weight of the question's tokens beside the answer's (distill only).
        full_share: Share of prompts that are trained with full attention, so that the adapter serves there, too.
        keep_full: Let the teacher read all documents of these prompts: full attention is to answer as it did without the
            adapter (distill only).
        plain_share: Rows of plain text from the documents, per prompt: the model is to go on with them as it did without the
            adapter, so that ordinary use stays as it is (distill only).
        max_steps: Optimizer steps at most.
        max_minutes: Training time at most; None = as long as the steps take.
        warmup_steps: Steps until the learning rate is at its highest.
        eval_steps: Steps between measurements on held-out prompts, each of which is also a checkpoint.
        patience: Measurements without improvement after which training stops.
        held_out: Prompts kept for these measurements.
        gradient_checkpointing: Recompute activations; None = on CUDA devices.
        seed: Of initial matrices and order.
    """

    objective: str = "distill"
    teacher_documents: str = "gold"
    chunk: ChunkOptions = field(default_factory=ChunkOptions)
    rank: int = 32
    alpha: int = 64
    learning_rate: float = 2e-4
    batch_size: int = 16
    micro_batch_tokens: int = 16384
    question_weight: float = 0.1
    full_share: float = 0.2
    keep_full: bool = False
    plain_share: float = 0.3
    max_steps: int = 300
    max_minutes: float | None = None
    warmup_steps: int = 8
    eval_steps: int = 25
    patience: int = 4
    held_out: int = 64
    gradient_checkpointing: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            low = (
                0 if option.name in ("question_weight", "full_share", "plain_share", "seed", "warmup_steps") else 1e-12
            )
            if is_number and not value >= low:
                raise ConfigError(f"{option.name} must be {'at least 0' if low == 0 else 'above 0'}, got {value!r}")
        if self.chunk.scales_scores or self.chunk.calibrated:
            raise ConfigError(
                "an adapter is trained with the model's own attention scores; leave chunk_temperature, chunk_bias and "
                "calibrated out (they can be calibrated for the adapted model afterwards)"
            )
        if self.teacher_documents not in TEACHER_DOCUMENTS:
            raise ConfigError(
                f"teacher_documents must be {' or '.join(map(repr, TEACHER_DOCUMENTS))}, got {self.teacher_documents!r}"
            )
        if self.keep_full and (not self.full_share or self.teacher_documents == "all"):
            why = "while full_share is 0" if not self.full_share else "where the teacher always reads all documents"
            raise ConfigError(f"keep_full has no effect {why}; leave it out")
        for name in ("full_share", "plain_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}")
