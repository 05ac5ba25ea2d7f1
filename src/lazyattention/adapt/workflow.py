# SPDX-License-Identifier: Apache-2.0
"""From documents to an adapter that `load_model(adapter=...)` loads: questions, answers, training, report."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from lazyattention.adapt.attention import TRAINING_ATTENTION_NAME
from lazyattention.adapt.config import AdaptConfig
from lazyattention.adapt.objectives import OBJECTIVES
from lazyattention.adapt.request import AdaptRequest
from lazyattention.adapt.rows import TrainingRow, make_batch
from lazyattention.adapt.samples import Sample, answer_samples, plain_samples
from lazyattention.adapt.sources import check_data, collect_examples, describe_samples
from lazyattention.adapt.trainer import STUDENT_METHOD, Trainer, TrainingLog, write_log
from lazyattention.config import EngineConfig
from lazyattention.engine.engine import Engine
from lazyattention.engine.measured import prompt_options
from lazyattention.engine.scoring import score
from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.models.adapter import REPORT_NAME
from lazyattention.models.loaded_model import LoadedModel
from lazyattention.quality.output import hold_output, is_kept
from lazyattention.quality.progress import progress_bar
from lazyattention.quality.sources import refuse_too_long
from lazyattention.reuse import Chunking
from lazyattention.utils.environment import describe_environment
from lazyattention.utils.packages import require_package

SAMPLES_NAME = "samples.jsonl"
MADE_NAME = "samples_made.json"
"""What SAMPLES_NAME depends on."""
# Mean KL between the engine's and the training attention's distributions that rounding explains.
_TOLERATED_KL = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
_NUM_CHECKED = 4


def run_adapt(loaded: LoadedModel, request: AdaptRequest, engine_config: EngineConfig | None = None) -> TrainingLog:
    """Make samples with the engine, then train. `loaded` is changed: it cannot serve afterwards; load it again.

    Returns:
        The training log; the folder then holds `adapter_config.json`, `adapter_model.safetensors` and `adapt.json`.

    Raises:
        ConfigError: Data cannot be read or made, peft is missing, the folder holds another run, or the engine's options
            ask for recomputed blocks.
        UnsupportedError: The model's training attention does not equal the engine's.
    """
    started_s = time.perf_counter()
    require_package("peft", "adapting", "quality")  # it is used after minutes of sampling
    if getattr(loaded.model, "quantization_method", None) is not None:
        raise UnsupportedError(
            "the model's weights are packed (quantised); adapt needs dense ones: load it dequantised"
        )
    if engine_config is not None and engine_config.recompute is not None:
        raise ConfigError(
            f"recompute={engine_config.recompute} cannot be trained for: the student reads every document under the chunk "
            "mask; leave recompute out, and use it when the adapter is served"
        )
    check_data(request)
    with hold_output(request.output):
        return _run_adapt(loaded, request, engine_config, started_s)


def _run_adapt(
    loaded: LoadedModel, request: AdaptRequest, engine_config: EngineConfig | None, started_s: float
) -> TrainingLog:
    # Layers stay as they are: they are trained afterwards.
    config = EngineConfig.of(engine_config, chunk=request.config.chunk, compile=False, cuda_graphs=False, max_loss=None)
    engine = Engine(loaded, config)
    samples = prepare_samples(engine, request)
    attention_check_kl = _check_attention(engine, loaded, samples[:_NUM_CHECKED], request.config)
    engine.model_runner.kv_pool.layers.clear()
    sampling_s = time.perf_counter() - started_s
    plain = plain_samples(samples, engine.prompts.first_token_ids(), request.config.seed)
    log, model = _train(loaded, samples, plain, request, engine.prompts.chunking(request.config.chunk))
    model.save_pretrained(str(request.output), save_embedding_layers=False)
    write_log(
        log,
        request.output / REPORT_NAME,
        config=asdict(request.config),
        model=loaded.name,
        base_weights_id=loaded.weights_id,
        served_with=prompt_options(config),
        data=list(request.data),
        num_samples=len(samples),
        sampling_s=sampling_s,
        attention_check_kl=attention_check_kl,
        peak_memory_bytes=torch.cuda.max_memory_allocated(loaded.device) if loaded.device.type == "cuda" else None,
        environment=describe_environment(),
    )
    return log


def prepare_samples(engine: Engine, request: AdaptRequest) -> list[Sample]:
    """Make the prompts and their answers, or read what an earlier run kept in the output folder.

    Raises:
        ConfigError: Data cannot be read or made, or the folder's samples are of other data or options.
    """
    objective = OBJECTIVES[request.config.objective]
    path = request.output / SAMPLES_NAME
    has_samples = is_kept(path, request.output / MADE_NAME, describe_samples(engine, request))
    examples = [] if has_samples else collect_examples(engine, request)
    chunk_options = (request.config.chunk,)
    refuse_too_long(engine, examples, system=request.system, max_tokens=request.max_tokens, chunk_options=chunk_options)
    with progress_bar("answering", len(examples), is_enabled=request.progress) as advance:
        return answer_samples(
            engine,
            examples,
            system=request.system,
            max_tokens=request.max_tokens,
            teacher_documents=request.config.teacher_documents,
            use_gold=objective.needs_answers,
            path=path,
            on_done=advance,
        )


def _check_attention(engine: Engine, loaded: LoadedModel, samples: Sequence[Sample], config: AdaptConfig) -> float:
    """Refuse a model that would be trained under other attention than it is served with; return their mean KL, nats."""
    served = score(
        engine,
        [sample.layout for sample in samples],
        [sample.answer for sample in samples],
        reuse_method=STUDENT_METHOD,
        chunk_options=config.chunk,
    )
    loaded.model.set_attn_implementation(TRAINING_ATTENTION_NAME)
    total = 0.0
    for sample, want in zip(samples, served, strict=True):
        row = TrainingRow.of(sample.layout, sample.answer, STUDENT_METHOD, engine.prompts.chunking(config.chunk))
        batch = make_batch([row], loaded.rotaries, device=loaded.device)
        with torch.no_grad():
            output: Any = loaded.model(
                input_ids=batch.input_ids,
                position_ids=batch.visibility.positions[None],
                use_cache=False,
                chunk_visibility=batch.visibility,
                logits_to_keep=batch.kept,
            )
        got = output.logits[0][batch.answer_mask].float().log_softmax(dim=-1)
        # Rounding may take a KL of nothing below 0.
        total += max(0.0, float((want.logprobs.exp() * (want.logprobs - got)).sum(dim=1).mean()))
    mean = total / len(samples)
    if not mean <= _TOLERATED_KL[loaded.dtype]:
        raise UnsupportedError(
            f"the attention this model would be trained with differs from the one it is served with (KL {mean:.2g}, "
            f"tolerated {_TOLERATED_KL[loaded.dtype]:g} in {loaded.dtype}); it cannot be adapted"
        )
    return mean


def _train(
    loaded: LoadedModel, samples: Sequence[Sample], plain: Sequence[Sample], request: AdaptRequest, chunking: Chunking
) -> tuple[TrainingLog, Any]:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = request.config
    torch.manual_seed(config.seed)
    lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(loaded.model, lora)
    for param in model.parameters():
        if param.requires_grad and param.dtype in (torch.bfloat16, torch.float16):
            param.data = param.data.float()
    if loaded.dtype in (torch.bfloat16, torch.float16):
        # Autocast brings the matrices to the input's type; the input would otherwise go to float32 and back.
        layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.cast_input_dtype_enabled = False
    checkpointing = (
        loaded.device.type == "cuda" if config.gradient_checkpointing is None else config.gradient_checkpointing
    )
    if checkpointing:
        _checkpoint_layers(loaded)
    pad_token_id = loaded.tokenizer.pad_token_id or 0
    trainer = Trainer(
        model,
        loaded.rotaries,
        samples,
        config,
        request.output,
        pad_token_id=pad_token_id,
        chunking=chunking,
        plain=plain,
    )
    with progress_bar("training", config.max_steps, is_enabled=request.progress) as advance:
        advance(trainer.log.num_steps)

        def show(log: TrainingLog) -> None:
            last = log.evaluations[-1]
            advance(1, f"loss {log.losses[-1]:.3f}, held-out {last['chunk']:.3f}, full attention {last['full']:.3f}")

        log = trainer.train(show)
    return log, model


def _checkpoint_layers(loaded: LoadedModel) -> None:
    """Recompute activations in the backward pass. Only layers learn that training is on: dropout stays off."""
    model: Any = loaded.model
    # The name up to transformers 5.2x, and the one that replaces it.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
