# SPDX-License-Identifier: Apache-2.0
"""One deletion request from data to audit: measure, unlearn, check, write, measure again, probe, report, record."""

import contextlib
import json
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers.trainer_utils import get_last_checkpoint

from lazyattention.errors import ConfigError, RequestError
from lazyattention.models.weights_id import tensors_digest
from lazyattention.unlearn import audit
from lazyattention.unlearn.adapters import export_adapter
from lazyattention.unlearn.architectures import architecture_of
from lazyattention.unlearn.compare import Arm, CompareOptions, compare
from lazyattention.unlearn.config import UnlearnConfig
from lazyattention.unlearn.data import QAExample, load_examples
from lazyattention.unlearn.delta import change_by_delta, write_delta
from lazyattention.unlearn.guards import CollapseError
from lazyattention.unlearn.ledger import append_entry, read_ledger
from lazyattention.unlearn.loading import TrainableModel, load_trainable
from lazyattention.unlearn.metrics import METRICS, EvalOptions, evaluate
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.unlearn.presets import CONTROLS
from lazyattention.unlearn.probes import PROBES, run_probes
from lazyattention.unlearn.purge import DeleteDocument, describe_purge, request_purge
from lazyattention.unlearn.report import write_report
from lazyattention.unlearn.simu import UnlearnResult, UnlearnSets, attribution_cost, check_retain_set, unlearn
from lazyattention.utils.environment import describe_environment

FORMATS = ("model", "adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlearnRequest:
    """What to do.

    Attributes:
        model: Folder, GGUF file or hub name; None = the default model.
        adapter: A LoRA adapter that belongs to the model.
        forget: File or name of the forget set; see `load_examples`.
        retain: Of the retain set.
        holdout: Of the holdout set.
        output: Folder to write to.
        config: Options of the run.
        output_format: "model" = full safetensors and a delta file; "adapter" = a PEFT adapter.
        metrics: Names; None = all that the sets allow.
        probes: Names; empty = none, None = all.
        retrained_logs: Result file of `eval` on a retrained model.
        controls: Run beside the result: names of `presets.CONTROLS`.
        control_seeds: Seeds of the controls.
        request_id: In the ledger; made up if empty.
        ledger: JSON lines; default `ledger.jsonl` beside the output folder.
        document_ids: Documents that have to leave the store too.
        num_answers: Answers of each set shown before and after; 0 = none, as they contain the forgotten text.
        resume: Continue an interrupted run in the same output folder.
        is_forced: Write even a collapsed model.
        progress: Show bars.
    """

    model: str | None
    forget: str
    output: Path
    config: UnlearnConfig
    adapter: Path | None = None
    retain: str | None = None
    holdout: str | None = None
    output_format: str = "model"
    metrics: tuple[str, ...] | None = None
    probes: tuple[str, ...] | None = ()
    retrained_logs: Path | None = None
    controls: tuple[str, ...] = ()
    control_seeds: tuple[int, ...] = (0,)
    request_id: str = ""
    ledger: Path | None = None
    document_ids: tuple[str, ...] = ()
    num_answers: int = 5
    resume: bool = False
    is_forced: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if self.output_format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {self.output_format!r}")
        if self.output_format == "adapter" and (
            self.config.train.attention == "full" or self.config.train.trainable == "everything"
        ):
            raise ConfigError(
                "format 'adapter' needs train.attention = 'lora' or 'frozen': weights trained in full have no exact "
                "low-rank form; set it, or use format 'model'"
            )
        if self.output_format == "model" and self.config.train.quantize != "none":
            raise ConfigError("a quantised base cannot be written back exactly; use format 'adapter'")
        for registry, names in ((CONTROLS, self.controls), (METRICS, self.metrics), (PROBES, self.probes)):
            for name in names or ():
                registry[name]  # an unknown name fails before anything is computed
        if (self.output / "results.json").exists() and not self.resume:
            raise ConfigError(f"{self.output} holds the result of another run; give another output folder")

    @property
    def ledger_path(self) -> Path:
        return self.ledger or self.output.parent / "ledger.jsonl"


def load_sets(forget: str, retain: str | None, holdout: str | None) -> UnlearnSets:
    """Read the three sets; overlaps are an error."""
    return UnlearnSets(
        forget=load_examples(forget, split="forget"),
        retain=load_examples(retain, split="retain") if retain else (),
        holdout=load_examples(holdout, split="holdout") if holdout else (),
    )


def run_request(
    request: UnlearnRequest, console: Console, *, delete_document: DeleteDocument | None = None
) -> dict[str, Any]:
    """Carry out one request and return its audit record.

    Args:
        request: What to do.
        console: Gets a few lines about each stage.
        delete_document: Called with each of `request.document_ids` once the model is written; see `request_purge`.

    Raises:
        CollapseError: The result lost the retain set and `is_forced` is not set; report and ledger say so.
    """
    config, is_main = request.config, PartialState().is_main_process
    sets = load_sets(request.forget, request.retain, request.holdout)
    check_retain_set(sets, config)
    splits = _splits(sets)
    prepare_folder(request.output)
    prepare_folder(request.ledger_path.parent)
    read_ledger(request.ledger_path)  # one that does not verify is named before hours of work
    progress = Progress(is_enabled=request.progress)
    loaded = load_trainable(request.model, config.train, adapter=request.adapter)
    console.print(f"model {loaded.name} on {loaded.model.device}; " + _sizes(splits))
    print_cost(loaded, sets, config, console)

    record: dict[str, Any] = {
        "schema": audit.SCHEMA,
        "request_id": request.request_id or f"unlearn-{uuid.uuid4().hex[:12]}",
        "environment": describe_environment(),
        "model": {"name": loaded.name, "digest_before": _digest(loaded)},
        "data": audit.describe_data(_sources(request), splits),
        "config": config.to_dict(),
        "config_digest": audit.config_digest(config),
        "unknown_from_paper": list(audit.UNKNOWN_FROM_PAPER),
        "non_claims": list(audit.NON_CLAIMS),
        "metrics": {},
    }
    if is_main:
        record["metrics"]["before"] = _evaluate(loaded.model, loaded, splits, request, "before")
        answers = audit.sample_answers(loaded.model, loaded.tokenizer, _shown(sets), config, request.num_answers)
    result = unlearn(
        loaded.model,
        loaded.tokenizer,
        sets,
        config,
        output_dir=request.output / "checkpoints",
        resume_from=_last_checkpoint(request, console),
        progress=progress,
    )
    with contextlib.suppress(OSError):
        (request.output / "checkpoints").rmdir()  # only if no checkpoint was asked for
    record["training"] = audit.describe_training(result, config)
    console.print(
        f"{result.guard.stop_reason} at step {result.guard.after['step']}: {result.num_changed:,} of "
        f"{result.num_trainable:,} trainable weights changed"
    )
    if not is_main:
        return record
    collapse = _collapse(result)
    is_refused = collapse is not None and not request.is_forced
    record["decision"] = audit.decide(result, is_refused=is_refused, is_forced=collapse is not None)
    failure: BaseException | None = collapse if is_refused else None
    if not is_refused:
        model = _write_outputs(request, loaded, result, record)
        try:
            record["metrics"]["after"] = _evaluate(model, loaded, splits, request, "after")
            after = audit.sample_answers(model, loaded.tokenizer, _shown(sets), config, request.num_answers)
            record["answers"] = _pair_answers(answers, after)
            result.model = model
            _extras(request, loaded, result, sets, record, console)
        except BaseException as error:
            # The model is written: whatever ended its measuring, ledger and report have to say that it exists.
            failure = error
            record["measuring_failed"] = f"{type(error).__name__}: {error}"
    _record_in_ledger(request, record, delete_document)
    if "purge" in record:
        console.print(f"store: {describe_purge(record['purge'])}", markup=False)
    write_report(record, request.output)
    console.print(f"{record['decision']['status']}: {request.output / 'report.html'}")
    if failure is not None:
        raise failure
    return record


def prepare_folder(folder: Path) -> None:
    """Make an output folder and try to write in it.

    Raises:
        ConfigError: It cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"cannot write to {str(folder)!r}: {error.strerror}; give another folder") from error


def print_cost(loaded: TrainableModel, sets: UnlearnSets, config: UnlearnConfig, console: Console) -> None:
    """Say what step 1 will cost before it starts."""
    if not config.needs_attribution:
        return
    cost = attribution_cost(loaded.model, loaded.tokenizer, sets, config)
    console.print(
        f"step 1 ({config.attribution.path}, {config.attribution.num_steps} points): {cost.num_passes:,} passes, "
        f"{cost.num_layer_passes:,} single layers, about {cost.flops:.2g} FLOP"
    )


def _extras(
    request: UnlearnRequest,
    loaded: TrainableModel,
    result: UnlearnResult,
    sets: UnlearnSets,
    record: dict[str, Any],
    console: Console,
) -> None:
    """Probes and controls, each only if asked for; both need fresh copies of models."""
    if request.probes is None or request.probes:
        console.print("probing")
        record["probes"] = run_probes(
            _reloader(request, record),
            loaded.tokenizer,
            {name: list(examples) for name, examples in _splits(sets).items()},
            probes=request.probes,
            seed=request.config.train.seed,
            progress=request.progress,
        )
    if request.controls:
        console.print(f"controls: {', '.join(request.controls)}")
        arms = [Arm("this run", request.config)]
        arms += [Arm(name, request.config.with_options(CONTROLS[name])) for name in request.controls]
        record["comparison"] = compare(
            lambda: load_trainable(request.model, request.config.train, adapter=request.adapter).model,
            loaded.tokenizer,
            sets,
            arms,
            CompareOptions(
                seeds=request.control_seeds,
                level_metric=request.config.guards.target_metric,
                level=result.guard.target if result.guard.target is not None else _final_level(result, request.config),
            ),
            progress=Progress(is_enabled=request.progress),
        )


def _final_level(result: UnlearnResult, config: UnlearnConfig) -> float:
    """Without a target, controls are matched at the forgetting this run ended with."""
    metric = config.guards.target_metric
    return float(result.guard.after["forget"]["mean_nll" if metric == "loss" else metric])


def _reloader(request: UnlearnRequest, record: dict[str, Any]) -> Callable[[], Any]:
    """Load what was written, as a user would."""
    if request.output_format == "adapter":
        return lambda: load_trainable(request.model, request.config.train, adapter=request.output / "adapter").model
    return lambda: load_trainable(str(request.output / "model"), request.config.train).model


def _write_outputs(
    request: UnlearnRequest, loaded: TrainableModel, result: UnlearnResult, record: dict[str, Any]
) -> Any:  # noqa: ANN401 - a transformers model or a PEFT wrapper
    """Write model or adapter, delta, neuron mask and scores; return the model as written."""
    output, model = request.output, result.model
    files = {"neuron_mask": "neuron_mask.safetensors"}
    result.mask.save(output / files["neuron_mask"])
    if result.scores is not None:
        files["attribution"] = "attribution.safetensors"
        result.scores.save(output / files["attribution"])
    if request.output_format == "adapter":
        if request.adapter is not None and request.config.train.adapter_in == "merge":
            raise RequestError(
                "an adapter for the base model cannot hold what the merged input adapter changed; use format 'model', "
                "or train.adapter_in = 'continue'"
            )
        export_adapter(
            output / "adapter",
            model,
            architecture_of(model),
            result.mask,
            result.original,
            attention=request.config.train.attention,
            base_model_name=str(loaded.folder),
        )
        files["adapter"] = "adapter"
    else:
        merge: Any = getattr(model, "merge_and_unload", None)
        if callable(merge):
            model = merge()
        write_delta(output / "delta.safetensors", result.base, result.original)
        model.save_pretrained(output / "model")
        files |= {"model": "model", "delta": "delta.safetensors"}
    loaded.tokenizer.save_pretrained(output / files.get("model", files.get("adapter", "model")))
    record["outputs"] = files
    record["model"]["digest_after"] = tensors_digest(dict(model.state_dict()))
    return model


def rollback(model: str, delta: Path, output: Path, config: UnlearnConfig, ledger: Path | None = None) -> str:
    """Turn an unlearned model back into the original, to the last bit, and write it.

    Args:
        model: The unlearned model's folder.
        delta: The run's delta file.
        output: Folder for the original model.
        config: Its dtype has to be the run's.
        ledger: Gets an entry if given.

    Returns:
        Digest of the restored weights: the run's `digest_before`.
    """
    loaded = load_trainable(model, config.train)
    change_by_delta(loaded.model, delta, "rollback")
    loaded.model.save_pretrained(output)
    loaded.tokenizer.save_pretrained(output)
    digest = _digest(loaded)
    if ledger is not None:
        append_entry(ledger, {"event": "rollback", "delta": delta.name, "weights_digest": digest})
    return digest


def _record_in_ledger(request: UnlearnRequest, record: dict[str, Any], delete_document: DeleteDocument | None) -> None:
    """Append what was done; the ledger holds hashes and numbers, no text."""
    ledger = request.ledger_path
    training = record["training"]
    if request.document_ids and record["decision"]["status"] != "refused":
        record["purge"] = request_purge(
            ledger.with_name("purge.jsonl"),
            record["request_id"],
            request.document_ids,
            delete=delete_document,
        )
    entry = {
        "event": "unlearn",
        "request_id": record["request_id"],
        "decision": record["decision"],
        "model": record["model"],
        "data": {name: {k: v for k, v in part.items() if k != "source"} for name, part in record["data"].items()},
        "config_digest": record["config_digest"],
        "config": record["config"],
        "seed": request.config.train.seed,
        "environment": record["environment"],
        "num_changed": training["num_changed"],
        "neuron_mask_digest": training["neurons"]["digest"],
        "metrics": {when: result.get("summary") for when, result in record["metrics"].items()},
        "measuring_failed": record.get("measuring_failed"),
        "purge": record.get("purge"),
    }
    record["ledger"] = {"path": str(ledger), "hash": append_entry(ledger, entry)["hash"]}


def _evaluate(
    model: Any,  # noqa: ANN401
    loaded: TrainableModel,
    splits: dict[str, Sequence[QAExample]],
    request: UnlearnRequest,
    when: str,
) -> dict[str, Any]:
    if request.metrics == ():
        return {}
    train = request.config.train
    return evaluate(
        model,
        loaded.tokenizer,
        splits,
        metrics=request.metrics,
        retrained_logs=request.retrained_logs,
        resume_path=request.output / f"metrics_{when}.json",
        progress=request.progress,
        options=EvalOptions(template=train.template, max_len=train.max_len),
    )


def _collapse(result: UnlearnResult) -> CollapseError | None:
    try:
        result.guard.refuse_collapse()
    except CollapseError as error:
        return error
    return None


def _last_checkpoint(request: UnlearnRequest, console: Console) -> str | None:
    folder = request.output / "checkpoints"
    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if found is not None and not request.resume:
        console.print(f"starting over: {found} of an interrupted run is not used; --resume would go on from it")
    return found if request.resume else None


def _pair_answers(
    before: dict[str, list[dict[str, str]]], after: dict[str, list[dict[str, str]]]
) -> dict[str, list[dict[str, str]]]:
    return {
        name: [
            {"question": b["question"], "expected": b["expected"], "before": b["given"], "after": a["given"]}
            for b, a in zip(rows, after[name], strict=True)
        ]
        for name, rows in before.items()
    }


def _shown(sets: UnlearnSets) -> dict[str, Sequence[QAExample]]:
    return {"forget": sets.forget, "retain": sets.retain}


def _splits(sets: UnlearnSets) -> dict[str, Sequence[QAExample]]:
    named = {"forget": sets.forget, "retain": sets.retain, "holdout": sets.holdout}
    return {name: list(examples) for name, examples in named.items() if examples}


def _sources(request: UnlearnRequest) -> dict[str, str]:
    named = {"forget": request.forget, "retain": request.retain, "holdout": request.holdout}
    return {name: str(source) for name, source in named.items() if source}


def _sizes(splits: dict[str, Sequence[QAExample]]) -> str:
    return ", ".join(f"{name}: {len(examples)} examples" for name, examples in splits.items())


def _digest(loaded: TrainableModel) -> str:
    with torch.no_grad():
        return tensors_digest(dict(loaded.model.state_dict()))


def read_record(folder: Path) -> dict[str, Any]:
    """Read the audit record of a run."""
    try:
        record: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no readable results.json ({error}); give the output folder of a run"
        ) from error
    return record
