# SPDX-License-Identifier: Apache-2.0
"""The files `bench_unlearn.py` keeps: one per model and run, whole at any moment, and all of them together."""

import argparse
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unlearn_seven_b import synchronize

from lazyattention.unlearn.compare import SCHEMA, CompareOptions, summarize_arms

# Measured as arms are, with seed 0: what forgetting starts from, and what it should come to.
REFERENCES = ("original", "retrained")


def say(args: argparse.Namespace, text: str) -> None:
    """Print a line with the seconds since the start, at once."""
    print(f"{time.time() - args.started:6.1f} s  {text}", flush=True)


@dataclasses.dataclass
class Record:
    """One file under WORK, written after each stage.

    Attributes:
        path: Of the file.
        content: JSON-able; "status" is "running", "done" or "failed", "stages_s" has seconds by stage.
    """

    args: argparse.Namespace
    path: Path
    content: dict[str, Any]

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, say so, and write what is known after it."""
        start = time.monotonic()
        yield
        synchronize(self.args.device)
        elapsed = time.monotonic() - start
        self.content.setdefault("stages_s", {})[name] = round(elapsed, 2)
        say(self.args, f"{self.path.stem}: {name} {elapsed:.1f} s")
        self.write()

    def write(self) -> None:
        """Write the file."""
        write_json(self.path, self.content)


def claim(path: Path) -> bool:
    """Take a run, unless another process has; the file's existence says so, and it is never seen half written."""
    mine = path.with_name(f"{path.name}.{os.getpid()}")
    write_json(mine, {"arm": None, "status": "running"})
    try:
        os.link(mine, path)
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True


def results_of(work: Path, options: CompareOptions, arms: list[str]) -> dict[str, Any]:
    """Collect what lies under WORK; runs that were trained but not measured to the end count, and are named."""
    kept = ("status", "num_workers", "stages_s", "attribution", "evaluation", "probes", "measuring_peak_memory_bytes")
    paths = sorted((work / "runs").glob("*.json"))
    records = [record for record in map(read_json, paths) if record["arm"] is not None]
    trained = [record for record in records if "run" in record and record["arm"] in arms]
    trained.sort(key=lambda record: (arms.index(record["arm"]), record["seed"]))
    runs = [record["run"] | {key: record[key] for key in kept if key in record} for record in trained]
    prepared = {name: read_json(work / f"prepared_{name}.json") for name in REFERENCES}
    alone = work / "alone.json"
    return {
        "reference": {name: record["reference"] for name, record in prepared.items()},
        "prepared": {name: record["stages_s"] | record["fine_tuning"] for name, record in prepared.items()},
        "models": {record["arm"]: record for record in records if record["arm"] in REFERENCES},
        "comparison": {
            "schema": SCHEMA,
            "level_metric": options.level_metric,
            "level": options.level,
            "utility_metric": options.utility_metric,
            "confidence": options.confidence,
            "seeds": list(options.seeds),
            "runs": runs,
            "arms": summarize_arms(runs, arms, options),
        },
        "alone": read_json(alone) if alone.exists() else {},
        "unfinished": [f"{r['arm']}:{r['seed']} {r['status']}" for r in records if r["status"] != "done"],
    }


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - any JSON-able value
    """Write beside the file and rename: whoever reads it at any moment finds it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    beside.replace(path)


def read_json(path: Path) -> Any:  # noqa: ANN401
    """Read what `write_json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
