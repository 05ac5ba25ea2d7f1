# SPDX-License-Identifier: Apache-2.0
"""Every figure the project wants to reach beside what was measured, as one table.

    python benchmarks/targets.py                                        # of the results kept in benchmarks/results
    COMMIT=... PYTHONPATH=src python3 benchmarks/targets.py --run --out OUT    # anew on one GPU, 5 minutes

Nothing is measured here: scripts of this folder write JSON, and this reads it. A run that was cut short goes on with the
first script of which OUT lacks a figure. The two rows of a CPU are what `make bench` and `host_path.py --plan` gave.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from target_rows import MODEL, Row, read, rows_of

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "results"


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown, each target named once, and how many cases are reached."""
    lines = [("what", "target", "case", "measured", "", "commit")]
    for before, row in zip([None, *rows], rows, strict=False):
        is_new = before is None or row.target is not before.target
        value = "-" if row.value is None else f"{row.value:.2f} {row.target.unit}"
        what, bound = (row.target.what, str(row.target)) if is_new else ("", "")
        lines.append((what, bound, row.case, value, row.verdict(), row.commit))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    text = "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )
    verdicts = [row.verdict().split(" by")[0] for row in rows if row.decides]
    counts = ", ".join(f"{verdicts.count(said)} {said}" for said in ("reached", "missed", "not measured"))
    return f"{text}\n\nOf {len(verdicts)} cases: {counts}.\n"


def steps_of(out: Path) -> dict[str, tuple[list[str], float]]:
    """Return what measures which source: a command, and the seconds it may take."""
    serving = f"--shape {MODEL} --device cuda --methods rotate_query,copy_rotate,prefix --alpha 1,2.1,0"
    serving += " --documents-per-request 10 --question-len 32-96 --requests 48"
    return {
        "ops": (["gpu_all.py", "--parts", "check,time", "--out", str(out)], 480),
        "tune": (["tune_ops.py", "--as-is", "--seconds", "200", "--out", str(out / "tune.json")], 240),
        "engine": (["gpu_engine.py", "--parts", "ttft,decode,profile", "--out", str(out)], 420),
        "serving": (["bench_serving.py", *serving.split(), "--out", str(out / "serving.json")], 480),
    }


def run_script(command: list[str], limit_s: float) -> str:
    """Run a script of this folder; stop it and all it started after the limit; return what went wrong, if anything."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    script = [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]]
    process = subprocess.Popen(script, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    try:
        return f"ended with {process.returncode}" if process.wait(limit_s) else ""
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(out: Path, run: Callable[[list[str], float], str] = run_script) -> None:
    """Run every script of which a figure is missing."""
    for source, (command, limit_s) in steps_of(out).items():
        missing = sum(row.value is None for row in rows_of(read(out)) if row.source == source)
        print(f"{source}: {missing} figures missing" if missing else f"{source}: measured before", flush=True)
        if missing and (trouble := run(command, limit_s)):
            print(f"{source}: {' '.join(command)} {trouble}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure if asked to, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="measure what --out lacks")
    parser.add_argument("--out", type=Path, help="folder of results; default: those that are kept")
    arguments = parser.parse_args(argv)
    if arguments.run:
        if arguments.out is None:
            parser.error("--run needs --out, a folder for results")
        arguments.out.mkdir(parents=True, exist_ok=True)
        # A run that is stopped from outside stops the script under way.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        measure(arguments.out)
    print(table(rows_of(read(arguments.out or KEPT))))


if __name__ == "__main__":
    main()
