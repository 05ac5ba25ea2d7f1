# SPDX-License-Identifier: Apache-2.0
"""`lazyattention unlearn`: run, attribute, eval, probe, report, compare, rollback, ledger.

Heavy imports stand inside the commands, so that `--help` answers at once.
"""

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lazyattention import envs
from lazyattention.documents.client import DocumentClient
from lazyattention.errors import ConfigError
from lazyattention.utils.packages import require_package

if TYPE_CHECKING:
    from lazyattention.unlearn.config import UnlearnConfig

unlearn_app = typer.Typer(
    help="Make a model forget what it was trained on, and show what that did.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_out, _err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)

_Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Folder, GGUF file or hub name; none = the default model.")
]
_Adapter = Annotated[Path | None, typer.Option("--adapter", help="LoRA adapter that belongs to the model.")]
_Forget = Annotated[str, typer.Option("--forget", "-f", help="What to forget: a JSONL file, or people/forget.")]
_Retain = Annotated[str | None, typer.Option("--retain", "-r", help="What to keep: a file, or people/retain.")]
_Holdout = Annotated[
    str | None, typer.Option("--holdout", help="Never trained on; gives the target and the attacks' non-members.")
]
_Method = Annotated[
    str, typer.Option("--method", help="simu, simu-mlp, soul, graddiff, npo, …; controls after '+': simu+random.")
]
_Set = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Any option, as section.name=value: -s optimizer.lr=1e-5.")
]
_ConfigFile = Annotated[Path | None, typer.Option("--config", help="JSON file of options, as in a run's results.json.")]
_Seed = Annotated[int, typer.Option("--seed", help="Of order, draws and initial adapters.")]
_Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1.")]
_Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show bars on a terminal.")]
_Url = Annotated[
    str,
    typer.Option(
        "--store-url", help="Server that holds them; its key is LAZYATTENTION_API_KEY, which names the scope."
    ),
]
_SplitOption = Annotated[
    list[str], typer.Option("--split", help="name=file, several times: forget, retain, holdout, real_authors, …")
]


def build_config(
    method: str, config_file: Path | None, options: list[str] | None, seed: int, device: str
) -> "UnlearnConfig":
    """Combine a method's preset, a file and single options; the later wins."""
    from lazyattention.unlearn.config import UnlearnConfig
    from lazyattention.unlearn.presets import preset

    overrides: dict[str, Any] = {"train.seed": seed, "neurons.seed": seed, "train.device": device}
    if config_file is not None:
        try:
            content = json.loads(config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config {config_file} is not a readable JSON file: {error}") from error
        # A results.json has its options under "config".
        sections = UnlearnConfig.from_dict(content.get("config", content)).to_dict()
        given = content.get("config", content)
        overrides |= {f"{s}.{n}": sections[s][n] for s in given for n in given[s]}
    for option in options or []:
        name, separator, value = option.partition("=")
        if not separator:
            raise ConfigError(f"--set {option!r} has no '='; write section.name=value")
        overrides[name.strip()] = value.strip()
    return preset(method, overrides=overrides)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say which extra is missing instead of showing an import error."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("peft", "scipy", "matplotlib"):
            raise ConfigError(
                f"unlearning needs the package {error.name}; run: pip install 'lazyattention[unlearn]'"
            ) from error
        raise


def _workflow() -> Any:  # noqa: ANN401 - a module
    for name in ("scipy", "matplotlib"):
        require_package(name, "unlearning", "unlearn")
    with _explained():
        workflow = importlib.import_module("lazyattention.unlearn.workflow")
    _quiet_transformers()
    return workflow


def _quiet_transformers() -> None:
    """Our own bars say what is going on; transformers' bars for every load and save do not."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _names(text: str | None) -> tuple[str, ...] | None:
    """Read "a,b"; "all" and nothing mean None, "none" means no names."""
    if text is None or text == "all":
        return None
    return () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())


def _load_splits(splits: list[str]) -> dict[str, Any]:
    from lazyattention.unlearn.data import load_examples

    loaded = {}
    for item in splits:
        name, separator, source = item.partition("=")
        if not separator:
            raise ConfigError(f"--split {item!r} has no '='; write name=file, for example forget=forget.jsonl")
        loaded[name] = load_examples(source, split=name)
    return loaded


@unlearn_app.command()
def run(
    forget: _Forget,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for model, evidence and report.")],
    model: _Model = None,
    adapter: _Adapter = None,
    retain: _Retain = None,
    holdout: _Holdout = None,
    method: _Method = "simu",
    output_format: Annotated[str, typer.Option("--format", help="model (safetensors) or adapter (PEFT).")] = "model",
    options: _Set = None,
    config_file: _ConfigFile = None,
    seed: _Seed = 0,
    device: _Device = "auto",
    metrics: Annotated[str, typer.Option(help="Names with commas, all, or none.")] = "all",
    probes: Annotated[str, typer.Option(help="Attacks on the result: names with commas, all, or none.")] = "none",
    controls: Annotated[str, typer.Option(help="Runs put beside the result: random,none,all,contrast.")] = "none",
    control_seeds: Annotated[int, typer.Option(min=1, help="Seeds per control.")] = 1,
    retrained_logs: Annotated[Path | None, typer.Option(help="Result of `eval` on a retrained model.")] = None,
    request_id: Annotated[str, typer.Option(help="Written into the ledger; made up if left out.")] = "",
    ledger: Annotated[Path | None, typer.Option(help="Default: ledger.jsonl beside the output folder.")] = None,
    store: Annotated[
        list[str] | None, typer.Option("--store", help="Id of a document that must leave the store too; repeatable.")
    ] = None,
    store_url: _Url = envs.SERVER_URL,
    answers: Annotated[int, typer.Option(help="Answers shown in the report per set; 0 keeps forgotten text out.")] = 5,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run (needs train.save_steps).")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write even a collapsed model.")] = False,
    progress: _Progress = True,
) -> None:
    """Unlearn, from data to report, in one command."""
    workflow = _workflow()
    request = workflow.UnlearnRequest(
        model=model,
        adapter=adapter,
        forget=forget,
        retain=retain,
        holdout=holdout,
        output=output,
        config=build_config(method, config_file, options, seed, device),
        output_format=output_format,
        metrics=_names(metrics),
        probes=_names(probes),
        retrained_logs=retrained_logs,
        controls=_names(controls) or (),
        control_seeds=tuple(range(seed, seed + control_seeds)),
        request_id=request_id,
        ledger=ledger,
        document_ids=tuple(store or ()),
        num_answers=answers,
        resume=resume,
        is_forced=force,
        progress=progress,
    )
    client = DocumentClient(store_url, envs.API_KEY)  # a wrong address is named before hours of work
    record = workflow.run_request(request, _err, delete_document=client.delete)
    _print_summary(record)


@unlearn_app.command()
def purge(
    purge_list: Annotated[Path, typer.Option("--list", help="The list that `run --store` wrote.")] = Path(
        "purge.jsonl"
    ),
    ledger: Annotated[Path | None, typer.Option(help="Default: ledger.jsonl beside the list.")] = None,
    store_url: _Url = envs.SERVER_URL,
) -> None:
    """Delete documents from a running server that `run --store` could not reach."""
    from lazyattention.unlearn.ledger import append_entry
    from lazyattention.unlearn.purge import describe_purge, run_pending_purges

    settled = run_pending_purges(purge_list, DocumentClient(store_url, envs.API_KEY).delete)
    for line in settled:
        append_entry(ledger or purge_list.with_name("ledger.jsonl"), {"event": "purge", **line})
        _out.print(f"{line['request_id']}: {describe_purge(line)}", markup=False)
    if not settled:
        _out.print(f"{purge_list}: nothing is pending", markup=False)


@unlearn_app.command()
def attribute(
    forget: _Forget,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for scores and mask.")],
    model: _Model = None,
    adapter: _Adapter = None,
    retain: _Retain = None,
    method: _Method = "simu",
    options: _Set = None,
    config_file: _ConfigFile = None,
    seed: _Seed = 0,
    device: _Device = "auto",
    progress: _Progress = True,
) -> None:
    """Step 1 alone: score neurons, select them, and say how well the scores add up."""
    workflow = _workflow()
    from lazyattention.unlearn.loading import load_trainable
    from lazyattention.unlearn.metrics.progress import Progress
    from lazyattention.unlearn.simu import choose_neurons, run_attribution

    config = build_config(method, config_file, options, seed, device)
    if not config.needs_attribution:
        raise ConfigError(f"method {method!r} needs no attribution; choose another method or control")
    workflow.prepare_folder(output)
    sets = workflow.load_sets(forget, retain, None)
    loaded = load_trainable(model, config.train, adapter=adapter)
    workflow.print_cost(loaded, sets, config, _err)
    scores = run_attribution(loaded.model, loaded.tokenizer, sets, config, progress=Progress(is_enabled=progress))
    mask, share = choose_neurons(loaded.model, scores, config)
    scores.save(output / "attribution.safetensors")
    mask.save(output / "neuron_mask.safetensors")
    table = Table("layer", "selected", "of", "residual")
    residuals = scores.residuals or [float("nan")] * len(mask.counts)
    for idx, (count, residual) in enumerate(zip(mask.counts, residuals, strict=True)):
        table.add_row(str(idx), str(count), str(mask.layers[idx].numel()), f"{residual:.1%}")
    _out.print(table)
    dual = "" if share is None else f"; dual neurons: {share:.1%}"
    _out.print(f"{mask.share:.2%} of the neurons in {scores.elapsed_s:.1f} s{dual}; written to {output}")


@unlearn_app.command("eval")
def evaluate_model(
    split: _SplitOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file; an interrupted run continues in it.")],
    model: _Model = None,
    adapter: _Adapter = None,
    metrics: Annotated[str, typer.Option(help="Names with commas, or all.")] = "all",
    retrained_logs: Annotated[Path | None, typer.Option(help="Result of this command on a retrained model.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples per pass.", show_default="by device")] = None,
    device: _Device = "auto",
    progress: _Progress = True,
) -> None:
    """Measure what a model knows of each set."""
    from lazyattention.unlearn.config import TrainConfig
    from lazyattention.unlearn.loading import load_trainable
    from lazyattention.unlearn.metrics import evaluate

    _quiet_transformers()
    with _explained():
        splits = _load_splits(split)
        loaded = load_trainable(model, TrainConfig(device=device), adapter=adapter)
        report = evaluate(
            loaded.model,
            loaded.tokenizer,
            splits,
            metrics=_names(metrics),
            batch_size=batch_size,
            retrained_logs=retrained_logs,
            resume_path=output,
            progress=progress,
        )
    table = Table("metric / set", "value")
    for name, value in report["summary"].items():
        table.add_row(name, "–" if value is None else f"{value:.4g}")
    _out.print(table)
    for name, reason in report["skipped"].items():
        _err.print(f"skipped {name}: it {reason}")


@unlearn_app.command()
def probe(
    split: _SplitOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file.")],
    model: _Model = None,
    adapter: _Adapter = None,
    probes: Annotated[str, typer.Option(help="Names with commas, or all.")] = "all",
    seed: _Seed = 0,
    device: _Device = "auto",
    progress: _Progress = True,
) -> None:
    """Attack a model: relearning, quantisation, paraphrases, prefixes."""
    workflow = _workflow()
    from lazyattention.unlearn.config import TrainConfig
    from lazyattention.unlearn.loading import load_trainable
    from lazyattention.unlearn.probes import run_probes

    workflow.prepare_folder(output.parent)
    with _explained():
        config = TrainConfig(device=device)
        first = load_trainable(model, config, adapter=adapter)
        report = run_probes(
            lambda: load_trainable(model, config, adapter=adapter).model,
            first.tokenizer,
            _load_splits(split),
            probes=_names(probes),
            seed=seed,
            progress=progress,
        )
    output.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    table = Table("probe", "set", "metric", "before", "after")
    for name, result in report["probes"].items():
        for split_name, after in result["after"].items():
            for metric in ("extraction_strength", "rouge_l"):
                before = result["before"].get(split_name, {}).get(metric)
                if isinstance(after.get(metric), float):
                    shown = "–" if before is None else f"{before:.3f}"
                    table.add_row(name, split_name, metric, shown, f"{after[metric]:.3f}")
    _out.print(table)
    for name, reason in report["skipped"].items():
        _err.print(f"skipped {name}: it {reason}")


@unlearn_app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Output folder of a run.")],
    answers: Annotated[bool, typer.Option("--answers/--no-answers", help="Show answers (forgotten text).")] = True,
) -> None:
    """Build report.html again from results.json, for example without the answers."""
    workflow = _workflow()
    from lazyattention.unlearn.report import write_report

    record = workflow.read_record(folder)
    if not answers:
        record.pop("answers", None)
    _out.print(str(write_report(record, folder)))


@unlearn_app.command()
def compare(
    forget: _Forget,
    retain: Annotated[str, typer.Option("--retain", "-r", help="What to keep; utility is measured on it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for comparison.json and .html.")],
    model: _Model = None,
    adapter: _Adapter = None,
    holdout: _Holdout = None,
    methods: Annotated[
        str, typer.Option(help="Arms with commas; the first is the reference.")
    ] = "simu,simu+random,simu+none,soul,graddiff",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per arm.")] = 3,
    level_metric: Annotated[
        str, typer.Option(help="Matched: loss, extraction_strength, exact_memorization, answer_probability.")
    ] = "loss",
    level: Annotated[float | None, typer.Option(help="Its value; default: the holdout set's.")] = None,
    options: _Set = None,
    config_file: _ConfigFile = None,
    device: _Device = "auto",
    progress: _Progress = True,
) -> None:
    """Methods, controls and seeds at matched forgetting: does the choice of neurons matter here?"""
    workflow = _workflow()
    workflow.prepare_folder(output)
    from lazyattention.unlearn.compare import Arm, CompareOptions
    from lazyattention.unlearn.compare import compare as run_comparison
    from lazyattention.unlearn.loading import load_trainable
    from lazyattention.unlearn.metrics.progress import Progress
    from lazyattention.unlearn.report import render_comparison

    arms = [Arm(name, build_config(name, config_file, options, 0, device)) for name in _names(methods) or ()]
    sets = workflow.load_sets(forget, retain, holdout)
    train = arms[0].config.train if arms else None
    first = load_trainable(model, train, adapter=adapter) if train else None
    if first is None:
        raise ConfigError("--methods names no method; give at least one")
    comparison = run_comparison(
        lambda: load_trainable(model, arms[0].config.train, adapter=adapter).model,
        first.tokenizer,
        sets,
        arms,
        CompareOptions(seeds=tuple(range(seeds)), level_metric=level_metric, level=level),
        progress=Progress(is_enabled=progress),
    )
    (output / "comparison.json").write_text(json.dumps(comparison, indent=1), encoding="utf-8")
    (output / "comparison.html").write_text(render_comparison(comparison), encoding="utf-8")
    print_comparison(comparison, _out)
    _out.print(f"written to {output}")


def print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """Print one line per arm."""

    def shown(part: dict[str, float | None] | None) -> str:
        if not part or part["mean"] is None:
            return "–"
        bounds = "" if part["low"] is None else f" [{part['low']:.3f}, {part['high']:.3f}]"
        return f"{part['mean']:.3f}{bounds}"

    console.print(
        f"retain {comparison['utility_metric']} where forget {comparison['level_metric']} first reaches "
        f"{comparison['level']:.3f}"
    )
    # Plain lines, not a table: on a narrow terminal they wrap where a table would cut the verdict.
    name_width = max(len(arm["arm"]) for arm in comparison["arms"])
    for arm in comparison["arms"]:
        matched = f"{arm['num_matched']}/{arm['num_runs']}"
        utility, difference = shown(arm["utility"]), shown(arm["difference"])
        line = f"{arm['arm']:<{name_width}}  {matched} matched  utility {utility:<22}  difference {difference:<24}"
        console.print(f"{line}  {arm['verdict']}", soft_wrap=True, markup=False)


@unlearn_app.command()
def rollback(
    model: Annotated[str, typer.Option("--model", "-m", help="The unlearned model's folder.")],
    delta: Annotated[Path, typer.Option("--delta", help="The run's delta.safetensors.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the original model.")],
    ledger: Annotated[Path | None, typer.Option(help="Gets an entry.")] = None,
    options: _Set = None,
) -> None:
    """Restore the original weights, to the last bit, from an unlearned model and its delta file."""
    workflow = _workflow()
    digest = workflow.rollback(str(model), delta, output, build_config("simu", None, options, 0, "cpu"), ledger)
    _out.print(f"restored {output}; weights digest {digest}")


@unlearn_app.command("ledger")
def show_ledger(path: Annotated[Path, typer.Argument(help="ledger.jsonl")]) -> None:
    """Check the ledger's hashes and list its entries."""
    from lazyattention.unlearn.ledger import read_ledger

    entries = read_ledger(path)
    table = Table("time (UTC)", "event", "request", "status", "hash")
    for entry in entries:
        status = entry.get("decision", entry).get("status", "")
        table.add_row(entry["time_utc"], entry["event"], entry.get("request_id", ""), status, entry["hash"][:12])
    _out.print(table)
    _out.print(f"{len(entries)} entries, all hashes match")


def _print_summary(record: dict[str, Any]) -> None:
    table = Table("metric / set", "before", "after")
    after = record["metrics"].get("after", {}).get("summary", {})
    for name, value in record["metrics"].get("before", {}).get("summary", {}).items():
        new = after.get(name)
        table.add_row(name, *("–" if v is None else f"{v:.4g}" for v in (value, new)))
    if table.row_count:
        _out.print(table)
    if "comparison" in record:
        print_comparison(record["comparison"], _out)
    _out.print(record["decision"]["reason"])
