# SPDX-License-Identifier: Apache-2.0
"""The same documents in changing orders: what each reuse method computes, and how long the first token takes.

`make demo` runs it on the default model and the documents of examples/. Three methods answer the same questions;
a fourth, `chunk_recompute`, recomputes every document under the chunk mask and must give the same answers as
`rotate_query`, token for token.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lazyattention.documents.document import Document
from lazyattention.documents.readers import read_documents
from lazyattention.engine.llm import LLM
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.models.loader import load_model

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
COMPARED = ("full_recompute", "prefix", "rotate_query")
ORACLE = "chunk_recompute"
SYSTEM = "Answer the question in one short sentence, using the documents."


@dataclass(frozen=True)
class Prompt:
    """One question and the documents it sees, in order."""

    question: str
    gold: str
    documents: list[Document]
    change: str


@dataclass(frozen=True)
class Measured:
    """What one method did with one prompt."""

    reuse_method: str
    question: str
    change: str
    answer: str
    token_ids: list[int]
    contains_gold: bool
    ttft_s: float
    e2e_s: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_reused_tokens: int


def make_prompts(documents: list[Document], questions: list[dict[str, str]], num_documents: int) -> list[Prompt]:
    """Five questions over the same documents: first seen, shuffled, one replaced, reversed, and reversed again.

    The last order repeats the one before it, which is the case that a prefix cache serves.
    """
    by_name = {Path(document.document_id).stem: document for document in documents}
    questions = [question for question in questions if question["document"] in by_name][:5]
    spare = by_name[questions[2]["document"]]
    first = [by_name[question["document"]] for question in questions if by_name[question["document"]] is not spare]
    first += [document for document in documents if document not in [*first, spare]]
    first = first[:num_documents]
    shuffled = random.Random(0).sample(first, len(first))
    # The newcomer takes the place of a document that no later question is about.
    needed = {question["document"] for question in questions[3:]}
    leaves = next((i for i, document in enumerate(shuffled) if Path(document.document_id).stem not in needed), 0)
    replaced = [spare if i == leaves else document for i, document in enumerate(shuffled)]
    backwards = replaced[::-1]
    orders = [
        (first, "first seen"),
        (shuffled, "shuffled"),
        (replaced, "one replaced"),
        (backwards, "reversed"),
        (backwards, "same order again"),
    ]
    return [
        Prompt(question["question"], question["answer"], order, change)
        for question, (order, change) in zip(questions, orders, strict=False)
    ]


def measure(llm: LLM, reuse_method: str, prompt: Prompt, max_tokens: int) -> Measured:
    """Ask one question greedily."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"\n\nQuestion: {prompt.question}"},  # the documents stand before it
    ]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    output = llm.chat(messages, params, documents=prompt.documents)[0]
    if output.error is not None:
        raise output.error
    completion = output.outputs[0]
    return Measured(
        reuse_method=reuse_method,
        question=prompt.question,
        change=prompt.change,
        answer=completion.text.strip(),
        token_ids=list(completion.token_ids),
        contains_gold=prompt.gold.lower() in completion.text.lower(),
        ttft_s=output.timings.ttft_s,
        e2e_s=output.timings.e2e_s,
        num_prompt_tokens=output.num_prompt_tokens,
        num_computed_tokens=output.num_computed_tokens,
        num_reused_tokens=output.num_reused_tokens,
    )


def run_all(args: argparse.Namespace, prompts: list[Prompt], console: Console) -> list[Measured]:
    """Answer all prompts with each method, one engine after the other."""
    methods = (*COMPARED[::-1], ORACLE)  # the quickest first: somebody is waiting for the first answer
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading the model", total=len(methods) * len(prompts))
        loaded = load_model(args.model, dtype=args.dtype, device=args.device, progress=False)
        for reuse_method in methods:
            with LLM(loaded, reuse_method=reuse_method, progress=False) as llm:  # each starts with nothing stored
                # One short unrelated question first: the first forward pass of a process pays for its buffers.
                llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=2))
                for prompt in prompts:
                    progress.update(task, description=f"{reuse_method}: {prompt.change}")
                    results.append(measure(llm, reuse_method, prompt, args.max_tokens))
                    progress.advance(task)
                    if reuse_method == "rotate_query":
                        print_answer(results[-1], progress.console)
    return results


def compare_answers(results: list[Measured]) -> list[str]:
    """Return the questions whose reused answer differs from the one recomputed under the chunk mask."""
    of = {(item.reuse_method, item.question): item.token_ids for item in results}
    questions = [item.question for item in results if item.reuse_method == ORACLE]
    return [question for question in questions if of["rotate_query", question] != of[ORACLE, question]]


def print_answer(item: Measured, console: Console) -> None:
    """One question with its answer and what it took."""
    console.print(f"[bold]{item.question}[/]  [dim]({item.change})[/]", highlight=False)
    console.print(f"  {' '.join(item.answer.split())}", markup=False, highlight=False)
    console.print(
        f"  [dim]first token after {item.ttft_s:.2f} s: {item.num_computed_tokens} prompt tokens computed, "
        f"{item.num_reused_tokens} reused[/]",
        highlight=False,
    )


def print_table(results: list[Measured], console: Console) -> None:
    """TTFT and tokens per question and method."""
    table = Table(title="\ntime to first token, prompt tokens computed/reused", title_justify="left", box=None)
    table.add_column("documents", style="dim", no_wrap=True)
    for reuse_method in COMPARED:
        table.add_column(reuse_method, justify="right", no_wrap=True)
    for item in (item for item in results if item.reuse_method == "rotate_query"):
        cells = []
        for reuse_method in COMPARED:
            of = next(x for x in results if (x.reuse_method, x.question) == (reuse_method, item.question))
            cells.append(f"{of.ttft_s:.2f} s {of.num_computed_tokens:>5}/{of.num_reused_tokens:<4}")
        table.add_row(item.change, *cells)
    console.print(table)


def summarise(results: list[Measured]) -> dict[str, float]:
    """Medians over the questions after the first, whose documents have been seen before."""
    seen = [item for item in results if item.change != "first seen"]

    def median_ttft_s(reuse_method: str) -> float:
        return statistics.median(item.ttft_s for item in seen if item.reuse_method == reuse_method)

    ours = median_ttft_s("rotate_query")
    return {
        "median_ttft_s": ours,
        "speedup_over_full_recompute": median_ttft_s("full_recompute") / ours,
        "speedup_over_prefix": median_ttft_s("prefix") / ours,
    }


def plot(results: list[Measured], path: Path) -> None:
    """Draw TTFT and tokens computed per question, one bar for each method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    changes = [item.change for item in results if item.reuse_method == COMPARED[0]]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for index, (reuse_method, colour) in enumerate(zip(COMPARED, ("#9aa5b1", "#e0a84a", "#2a78c2"), strict=True)):
        items = [item for item in results if item.reuse_method == reuse_method]
        places = [place + (index - 1) * 0.27 for place in range(len(changes))]
        for axis, heights, pattern in (
            (axes[0], [item.ttft_s for item in items], "{:.2g}"),
            (axes[1], [item.num_computed_tokens for item in items], "{:.0f}"),
        ):
            bars = axis.bar(places, heights, 0.25, label=reuse_method, color=colour)
            axis.bar_label(bars, [pattern.format(height) for height in heights], fontsize=6, padding=1)
    axes[0].set_ylabel("time to first token, seconds")
    axes[1].set_ylabel("prompt tokens computed")
    for axis in axes:
        axis.set_xticks(range(len(changes)), [change.replace(" ", "\n", 1) for change in changes])
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.1)
    axes[0].set_xlabel("documents, compared with the question before")
    axes[1].set_xlabel("documents, compared with the question before")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def describe_run(args: argparse.Namespace) -> dict[str, str]:
    """What the numbers depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=EXAMPLES, capture_output=True, text=True)
    return {
        "model": args.model or "SmolLM2-135M-Instruct (default)",
        "dtype": args.dtype,
        "device": args.device,
        "platform": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}",
        "commit": commit.stdout.strip() or "unknown",
        **{name: version(name) for name in ("lazyattention", "torch", "transformers")},
    }


def main(argv: list[str] | None = None) -> None:
    """Run the comparison, print it, write `demo.json` and `demo.png`; exit 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub name; default: a small model from a package")
    parser.add_argument("--dtype", default="float32", help="float32 makes equal answers a matter of mathematics")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--documents", nargs="+", default=[EXAMPLES / "documents"])
    parser.add_argument("--questions", type=Path, default=EXAMPLES / "questions.json")
    parser.add_argument("--num-documents", type=int, default=4, help="documents per question")
    parser.add_argument("--max-tokens", type=int, default=24, help="per answer")
    parser.add_argument("--output", type=Path, default=Path("demo-results"))
    args = parser.parse_args(argv)

    console = Console()
    started_s = time.monotonic()
    prompts = make_prompts(
        read_documents(args.documents).documents, json.loads(args.questions.read_text()), args.num_documents
    )
    console.print(f"{len(prompts)} questions over {len(prompts[0].documents)} documents each, in changing orders\n")
    results = run_all(args, prompts, console)
    print_table(results, console)
    summary, different = summarise(results), compare_answers(results)
    console.print(
        f"\nDocuments seen before: first token after {summary['median_ttft_s']:.2f} s (median), "
        f"[bold green]{summary['speedup_over_full_recompute']:.1f}x[/] faster than full_recompute and "
        f"[bold green]{summary['speedup_over_prefix']:.1f}x[/] faster than prefix.",
        highlight=False,
    )
    num_equal = len(prompts) - len(different)
    console.print(
        f"{num_equal} of {len(prompts)} answers of rotate_query equal {ORACLE}'s (every document computed anew under "
        "the chunk mask), token for token."
    )
    found = [
        f"{sum(item.contains_gold for item in results if item.reuse_method == reuse_method)} with {reuse_method}"
        for reuse_method in COMPARED
    ]
    console.print(f"Answers that contain the expected words, of {len(prompts)}: {', '.join(found)}.", highlight=False)
    args.output.mkdir(parents=True, exist_ok=True)
    plot(results, args.output / "demo.png")
    content = {"run": describe_run(args), "summary": summary, "different": different}
    content["results"] = [asdict(item) for item in results]
    (args.output / "demo.json").write_text(json.dumps(content, indent=1) + "\n")
    console.print(
        f"[dim]wrote {args.output}/demo.png and {args.output}/demo.json in {time.monotonic() - started_s:.0f} s[/]"
    )
    if different:
        console.print(f"[bold red]These answers differ:[/] {different}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
