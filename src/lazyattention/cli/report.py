# SPDX-License-Identifier: Apache-2.0
"""What happened to a question's documents and tokens, for people (table) and for programs (dictionary)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lazyattention.documents.readers import SkippedFile

if TYPE_CHECKING:
    from lazyattention.engine.outputs import DocumentReuse, RequestOutput

_COLOURS = {"hit": "green", "miss": "yellow", "computed": "blue"}
_MAX_SKIPPED_LINES = 8


def reuse_table(documents: Sequence["DocumentReuse"]) -> Table:
    """One row per chunk in prompt order: which document, how many tokens, hit or miss, and why."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("document", overflow="fold")
    table.add_column("tokens", justify="right")
    table.add_column("KV", justify="right")
    table.add_column("reuse")
    table.add_column("why")
    chunks_of = {item.document_id: 0 for item in documents}
    for item in documents:
        chunks_of[item.document_id] = max(chunks_of[item.document_id], item.chunk_index + 1)
    for item in documents:
        count = chunks_of[item.document_id]
        name = item.document_id + (f" [{item.chunk_index + 1}/{count}]" if count > 1 else "")
        status = Text(item.status, style=_COLOURS.get(item.status, ""))
        table.add_row(Text(name), f"{item.num_tokens:,}", human_bytes(item.num_bytes), status, Text(item.reason))
    return table


def summary_line(output: "RequestOutput", reuse_method: str) -> Text:
    """TTFT, prompt tokens computed and reused, tokens generated and their pace, in one line."""
    timings = output.timings
    num_generated = sum(len(completion.token_ids) for completion in output.outputs)
    parts = [
        f"first token after {seconds(timings.ttft_s)}",
        f"{output.num_computed_tokens:,} of {output.num_prompt_tokens:,} prompt tokens computed",
        f"{output.num_reused_tokens:,} reused",
        *([f"{output.num_recomputed_tokens:,} recomputed"] if output.num_recomputed_tokens else []),
        f"{num_generated:,} generated in {seconds(timings.e2e_s)}",
        reuse_method,
    ]
    return Text(" · ".join(parts), style="dim")


def answer_report(output: "RequestOutput", reuse_method: str) -> RenderableType:
    """Table and summary below an answer."""
    summary = summary_line(output, reuse_method)
    return Group(reuse_table(output.documents), summary) if output.documents else summary


def skipped_report(skipped: Sequence[SkippedFile]) -> Text:
    """The files that were found and not read, with the reasons; the longest part of a long list is left out."""
    lines = [f"{len(skipped)} not read:"] + [f"  {item.path}: {item.reason}" for item in skipped[:_MAX_SKIPPED_LINES]]
    if len(skipped) > _MAX_SKIPPED_LINES:
        lines.append(f"  and {len(skipped) - _MAX_SKIPPED_LINES} more")
    return Text("\n".join(lines), style="dim")


def to_dict(question: str, output: "RequestOutput", *, model: str, reuse_method: str) -> dict[str, Any]:
    """Everything about one answer as plain values for `--json`."""
    completion = output.outputs[0]
    return {
        "question": question,
        "answer": completion.text,
        "finish_reason": completion.finish_reason,
        "model": model,
        "reuse_method": reuse_method,
        "ttft_s": output.timings.ttft_s,
        "e2e_s": output.timings.e2e_s,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_computed_tokens": output.num_computed_tokens,
        "num_reused_tokens": output.num_reused_tokens,
        "num_recomputed_tokens": output.num_recomputed_tokens,
        "selection_s": output.timings.selection_s,
        "num_output_tokens": len(completion.token_ids),
        "documents": [
            {
                "document_id": item.document_id,
                "title": item.title,
                "chunk_index": item.chunk_index,
                "num_tokens": item.num_tokens,
                "num_bytes": item.num_bytes,
                "status": item.status,
                "reason": item.reason,
                "num_recomputed_tokens": item.num_recomputed_tokens,
            }
            for item in output.documents
        ],
    }


def seconds(value_s: float | None) -> str:
    """`value_s` with a sensible unit; "-" for None."""
    if value_s is None:
        return "-"
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"


def human_bytes(num_bytes: int) -> str:
    """`num_bytes` in KiB, MiB or GiB."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"
