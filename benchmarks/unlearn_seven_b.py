# SPDX-License-Identifier: Apache-2.0
"""Time and memory of both steps of SIMU on random weights of a Llama-2-7B shape; extrapolations are named so."""

import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lazyattention.unlearn.architectures import architecture_of
from lazyattention.unlearn.attribution import attribute, estimate_cost
from lazyattention.unlearn.batch import TokenBatch, logits_of, mean_nll
from lazyattention.unlearn.config import AttributionConfig, OptimizerConfig
from lazyattention.unlearn.curvature import gauss_newton_bartlett
from lazyattention.unlearn.masked_step import clip_gradients
from lazyattention.unlearn.neuron_mask import NeuronMask, freeze_all_but, random_mask, trainable_parameters
from lazyattention.unlearn.sophia import MaskedSophia

_SEVEN_B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_TINY = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 4}
_VOCAB_SIZE = 32000


def seven_b(device: str) -> dict[str, Any]:
    """Measure step 1 on one batch and step 2 for a few updates; on a CPU a tiny shape shows that it runs."""
    tiny = device == "cpu"
    dtype = torch.float32 if tiny else torch.bfloat16
    config = AutoConfig.for_model("llama", vocab_size=_VOCAB_SIZE, **(_TINY if tiny else _SEVEN_B))
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    size, seq_len, m = (2, 16, 2) if tiny else (8, 128, 4)
    input_ids = torch.randint(0, _VOCAB_SIZE, (size, seq_len), device=device)
    labels = input_ids.clone()
    labels[:, : seq_len // 2] = -100
    batch = TokenBatch(input_ids, torch.ones_like(input_ids), labels)
    result: dict[str, Any] = {
        "shape": _TINY if tiny else _SEVEN_B, "dtype": str(dtype), "batch": [size, seq_len], "num_steps": m,
        "num_params": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    attribute(model, [batch], None, AttributionConfig(path="fast"))  # warm-up
    for path in ("layerwise", "fast"):
        config = AttributionConfig(path=path, num_steps=m)
        reset_peak(device)
        scores = attribute(model, [batch], None, config)
        cost = estimate_cost(model, [batch], config)
        result[f"attribution_{path}"] = {
            "measured_s_per_batch": scores.elapsed_s, "flops_estimated": cost.flops,
            "flops_per_s": cost.flops / scores.elapsed_s, "peak_memory_bytes": peak(device),
        }  # fmt: skip
    whole = estimate_cost(model, [batch] * 50, AttributionConfig(num_steps=20))
    rate = result["attribution_layerwise"]["flops_per_s"]
    result["attribution_400_examples_20_points_extrapolated_s"] = whole.flops / rate
    return result | _steps(model, batch, device)


def _steps(model: PreTrainedModel, batch: TokenBatch, device: str) -> dict[str, Any]:
    """Three SIMU updates: attention in full, 5 % of the neurons, compact optimizer.state with float32 copies."""
    architecture = architecture_of(model)
    num = architecture.down[0].num_neurons("in")
    layers = tuple(torch.arange(num) < max(num // 20, 1) for _ in architecture.layers)
    params, selections = trainable_parameters(model, architecture, random_mask(NeuronMask("in", layers), 0), "full")
    freeze_all_but(model, params.values())
    optimizer = MaskedSophia(list(params.values()), OptimizerConfig(), selections)
    generator, times = torch.Generator().manual_seed(0), []
    reset_peak(device)
    for step in range(3):
        synchronize(device)
        start = time.monotonic()
        if step == 0:
            num_predictions = gauss_newton_bartlett(lambda b: logits_of(model, b), batch, generator)
            optimizer.update_curvature(num_predictions)
            optimizer.zero_grad()
        mean_nll(logits_of(model, batch), batch.labels).backward()
        clip_gradients(params.values(), selections, 1.0, "trainable")
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        times.append(time.monotonic() - start)
    state = sum(
        t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)
    )
    dense = sum(p.numel() for p in model.parameters()) * 2 * 4
    return {
        "step_s": times, "optimizer_state_bytes": state, "dense_sophia_state_bytes_computed": dense,
        "training_peak_memory_bytes": peak(device),
    }  # fmt: skip


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Start measuring peak memory."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> int | None:
    """Peak memory in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else None
