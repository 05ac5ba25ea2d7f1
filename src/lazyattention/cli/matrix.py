# SPDX-License-Identifier: Apache-2.0
"""The support matrix of `models/matrix.py` as a terminal table."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyattention.models import matrix


def matrix_rows() -> list[dict[str, Any]]:
    """One dictionary per tested configuration."""
    return [
        {
            "family": row.title,
            "model_type": row.model_type,
            "variant": row.variant,
            "features": list(row.features),
            "refused": row.refused,
        }
        for row in matrix.rows()
    ]


def print_matrix(console: Console) -> None:
    """Exact families first, then what is refused and why."""
    exact = Table(title="Exact: reuse equals recomputation", title_justify="left", box=None, header_style="dim")
    for column in ("family", "model_type", "RoPE", "besides"):
        exact.add_column(column)
    refused = Table(title="Refused at load", title_justify="left", box=None, header_style="dim")
    for column in ("model_type", "which", "why"):
        refused.add_column(column)
    for row in matrix.rows():
        if row.refused is None:
            exact.add_row(row.title, row.model_type, row.variant, ", ".join(row.features))
        else:
            refused.add_row(row.model_type, row.variant, Text(row.refused))
    console.print(exact, "", refused, soft_wrap=False)
