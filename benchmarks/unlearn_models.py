# SPDX-License-Identifier: Apache-2.0
"""What `bench_unlearn.py` starts from: a base model, TOFU's files, and the fine-tuned original and retrained model."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.unlearn.batch import IGNORED_LABEL, pad_right
from lazyattention.unlearn.data import QAExample, encode_examples, load_examples, pad_id_of

# Batches are cut from examples sorted by length within so many batches' worth of shuffled ones.
_BATCHES_PER_SORT = 8


def load_base(path: str, device: str) -> tuple[Any, Any]:
    """Load weights in float32; a GGUF file is dequantised into a clean model."""
    if not path.endswith(".gguf"):
        tokenizer = AutoTokenizer.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval(), tokenizer
    file = Path(path)
    options = {"gguf_file": file.name, "dtype": torch.float32}
    try:
        from transformers.utils.quantization_config import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass  # this transformers dequantises by itself
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    config = AutoConfig.for_model(
        loaded.config.model_type,
        **{k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "model_type")},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    return model.to(device).eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def load_tofu(folder: Path, smoke: bool) -> dict[str, Any]:
    """Forget, retain and the perturbed sets for truth ratio and utility."""
    limit = {"forget": 8, "retain": 16} if smoke else {"forget": None, "retain": None}
    num = 3 if smoke else 100
    return {
        "forget": load_examples(folder / "tofu_forget10.json", split="forget", limit=limit["forget"]),
        "retain": load_examples(folder / "tofu_retain90.json", split="retain", limit=limit["retain"]),
        "eval": {
            "forget": load_examples(folder / "tofu_forget10_perturbed.json", split="forget")[: num * 4 : 4],
            "retain": load_examples(folder / "tofu_retain_perturbed.json", split="retain")[: num * 4 : 4],
            "real_authors": load_examples(folder / "tofu_real_authors_perturbed.json", split="real_authors", limit=num),
            "world_facts": load_examples(folder / "tofu_world_facts_perturbed.json", split="world_facts", limit=num),
        },
    }


def batches_by_length(lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[list[int]]:
    """Shuffle places, then put similar lengths together: batches in random order, little padding.

    Returns:
        Every place once, in lists of at most `batch_size`.
    """
    order = list(range(len(lengths)))
    rng.shuffle(order)
    span = batch_size * _BATCHES_PER_SORT
    batches = []
    for start in range(0, len(order), span):
        part = sorted(order[start : start + span], key=lambda place: lengths[place])
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    rng.shuffle(batches)
    return batches


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[QAExample],
    *,
    num_epochs: int,
    lr: float,
    batch_size: int,
    seed: int = 0,
) -> dict[str, float]:
    """Plain AdamW with warm-up and linear decay on the answers; returns steps, seconds and the last losses' mean.

    Weights stay in float32 (TF32 products on a GPU): at this size a GPU waits for the host, and autocast doubles the
    number of kernels.
    """
    torch.manual_seed(seed)
    rows = [(e.input_ids, e.labels) for e in encode_examples(tokenizer, examples)]
    lengths = [len(ids) for ids, _ in rows]
    num_steps = num_epochs * -(-len(rows) // batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=model.device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(num_steps // 20, 1), 1 - step / (num_steps + 1))
    )
    rng = random.Random(seed)
    model.train()
    start, losses = time.monotonic(), []
    for _ in range(num_epochs):
        for places in batches_by_length(lengths, batch_size, rng):
            batch = pad_right([rows[place] for place in places], pad_id_of(tokenizer))
            # Logits at positions that predict an answer token of some row only; found on the host, so nothing waits.
            keep = (batch.labels[:, 1:] != IGNORED_LABEL).any(dim=0).nonzero().flatten()
            targets = batch.labels[:, keep + 1].to(model.device)
            batch = batch.to(model.device)
            logits = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, logits_to_keep=keep
            ).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    last = torch.stack(losses[-max(len(losses) // 20, 1) :]).mean()
    model.eval()
    return {"num_steps": len(losses), "training_s": time.monotonic() - start, "last_loss": float(last)}
