# SPDX-License-Identifier: Apache-2.0
"""Check the kernels on one GPU, then tune and time them; a short table comes last, everything goes to a JSON file.

    PYTHONPATH=src python3 benchmarks/gpu_all.py --out OUT [--parts check,sweep,time] [--minutes 4]

Timing is refused while a check is red. Kernels that later parts need are compiled by a pool of processes meanwhile.
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


SHAPE_FIELDS = ("tile_m", "tile_kv", "num_warps", "num_stages", "programs_per_multiprocessor")
SWEEPS = [(head_dim, kind) for head_dim in (128, 64, 256) for kind in ("decode_few", "decode_many", "prefill")]


def compile_ahead(job: tuple[str, int, tuple[int, ...]]) -> str:
    """Launch one kernel once on a tiny problem, so that its binary is in Triton's cache."""
    import bench_ops
    import torch

    from lazyattention.ops._tiles import TileShape

    kind, head_dim, numbers = job
    shape = TileShape(*numbers)
    try:
        if kind == "prefill":
            problem = bench_ops.prefill_problem(64, 1024, head_dim=head_dim)
            spec = problem.spec(prefill=shape, has_unmasked_prefill=False)
        else:
            problem = bench_ops.make_problem(
                [((0, 1), 3, 1)] * (40 if kind == "decode_many" else 1), 2, 512, head_dim=head_dim
            )
            spec = problem.spec(**{kind: shape})
        problem.launches(spec)[1]["attend"]()
        torch.cuda.synchronize()
    except Exception as error:  # a shape that does not fit is found again, and recorded, by the sweep
        return f"{job}: {error!r}"[:150]
    return ""


def provenance() -> dict[str, str]:
    """Say on what this was measured."""
    import bench_ops
    import torch
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.split("\n", 1)[0]  # fmt: skip
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "host": bench_ops.host_name(),
        "commit": os.environ.get("COMMIT") or commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def run_tests(out: Path, name: str, selection: str, workers: int, timeout_s: float) -> bool:
    """Run some of the GPU tests, compiling in parallel; True when green. A kernel that hangs is a failure, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_kernels.py", "-p", "no:cacheprovider"]
    command += [
        "-n",
        str(workers),
        "--maxfail=12",
        "--tb=short",
        "-v",
        "-o",
        "faulthandler_timeout=60",
        "-k",
        selection,
    ]
    # References run on the CPU: one pool of all cores per worker would make them wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    log = out / f"{name}.log"
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, check=False, timeout=timeout_s, env=environment
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: not done after {timeout_s} s; {log} names the tests that are", flush=True)
            return False
    output = log.read_text()
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    print("\n".join(lines[:40]))
    print(output.strip().splitlines()[-1] if output.strip() else "no output", flush=True)
    return done.returncode == 0


def run_checks(out: Path, workers: int) -> bool:
    """Run all GPU tests; where the kernel for tiles without a mask fails its own, time without it."""
    import bench_ops

    own = "(long_contiguous or never_race)"
    if not run_tests(out, "unmasked_prefill", own, workers, 100.0):
        print("unmasked prefill fails: timed without it")
        bench_ops.has_unmasked_prefill = lambda *_: False
        run_tests(out, "tests", f"not {own}", workers, 200.0)
        return False
    return run_tests(out, "tests", f"not {own}", workers, 200.0)


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="check,sweep,time")
    parser.add_argument("--minutes", type=float, default=4.0, help="sweeps stop early rather than exceed this")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--sweeps", default="", help="only sweeps whose name contains this")
    parser.add_argument("--force", action="store_true", help="time even when a check is red")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    deadline = time.monotonic() + arguments.minutes * 60
    arguments.out.mkdir(parents=True, exist_ok=True)

    import bench_ops

    sweeps = [(head_dim, kind) for head_dim, kind in SWEEPS if arguments.sweeps in f"{kind}_{head_dim}"]
    jobs = []
    if "sweep" in parts:
        for head_dim, kind in sweeps:
            shapes = (
                bench_ops.prefill_shapes(head_dim) if kind == "prefill" else bench_ops.decode_shapes(head_dim, kind)
            )
            jobs += [
                (kind, head_dim, (s.tile_m, s.tile_kv, s.num_warps, s.num_stages, s.programs_per_multiprocessor))
                for s in shapes
            ]
    results: dict = {}
    started = time.monotonic()

    def mark(what: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {what}", flush=True)
        (arguments.out / "ops.json").write_text(json.dumps(results, indent=1))

    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.workers) as pool:
        pending = pool.imap_unordered(compile_ahead, jobs)
        green = run_checks(arguments.out, arguments.workers) if "check" in parts else True
        results["checks_green"] = green if "check" in parts else None
        mark("checks")
        if jobs:
            troubles = []
            for _ in jobs:
                try:
                    troubles.append(pending.next(timeout=max(1.0, deadline - time.monotonic() - 100)))
                except multiprocessing.TimeoutError:
                    break
            results["did_not_compile"] = [trouble for trouble in troubles if trouble]
            mark(f"compiled {len(troubles)} of {len(jobs)}, without success {len(results['did_not_compile'])}")
        pool.terminate()
    if not green and not arguments.force:
        print("checks are red: nothing is timed")
        return
    results["provenance"] = provenance()
    results["ceilings"] = bench_ops.ceilings()
    print(results["ceilings"])
    if "time" in parts:
        measure(results, mark)
    if "sweep" in parts:
        for head_dim, kind in sweeps:
            if kind == "prefill":
                rows = bench_ops.sweep_prefill(head_dim, bench_ops.prefill_shapes(head_dim), deadline)
            else:
                rows = bench_ops.sweep_decode(head_dim, kind, bench_ops.decode_shapes(head_dim, kind), deadline)
            results[f"sweep_{kind}_{head_dim}"] = rows
            mark(f"sweep {kind} {head_dim}")
        print_sweeps(results)
    if "time" in parts:
        print_results(results)
    mark("done")


def measure(results: dict, mark: object) -> None:
    """Time every row of the table."""
    import bench_ops

    steps = {
        "decode": lambda: bench_ops.bench_decode(results["ceilings"]["read_tb_s"]),
        "prefill": lambda: bench_ops.bench_prefill(
            [(128, 8192), (128, 65536), (512, 8192), (512, 32768), (2048, 8192), (2048, 32768), (2048, 65536)]
        ),
        "prefill_variants": bench_ops.bench_prefill_variants,
        "float8": bench_ops.bench_float8,
        "copies": lambda: bench_ops.bench_copies(results["ceilings"]["copy_tb_s"]),
        "plan": bench_ops.bench_plan,
        "run": bench_ops.bench_run,
    }
    for name, step in steps.items():
        try:
            results[name] = step()
        except Exception as error:  # one broken row must not cost the others
            import traceback

            results[name] = {"error": repr(error)}
            traceback.print_exc()
        mark(name)  # type: ignore[operator]


def print_sweeps(results: dict) -> None:
    """Print the best shapes per problem."""
    for name, rows in results.items():
        if not name.startswith("sweep_"):
            continue
        keys = [key for key in (rows[0] if rows else {}) if key not in SHAPE_FIELDS]
        for key in keys:
            timed = [row for row in rows if isinstance(row.get(key), float)]
            timed.sort(key=lambda row: row[key], reverse="prefill" in name)
            best = [f"{tuple(r[field] for field in SHAPE_FIELDS)} {r[key]:.4g}" for r in timed[:5]]
            print(f"{name} {key} [{len(timed)}/{len(rows)}]: " + " | ".join(best))


def print_results(results: dict) -> None:
    """Print the short table."""
    for row in results.get("decode", []):
        if not isinstance(row, dict):
            continue
        print(
            f"decode {row['requests']:>3} a={row['alpha']}: floor {row['floor_ms']:.3f} ms; attend {row['attend']:.3f}"
            f" + merge {row['merge']:.3f} = {row['all']:.3f} ({row['of_read_bandwidth']:.0%}); tasks {row['tasks']};"
            f" attend without turn {row['attend_without_turn']:.3f}; apart {row.get('one_read_per_request_ms')};"
            f" stock {row.get('stock_on_copies_ms')}"
        )
    for row in results.get("prefill", []):
        if isinstance(row, dict):
            print(
                f"prefill {row['rows']} x {row['keys']}: {row['ms']:.3f} ms {row['tflop_s']:.0f} TFLOP/s, {row['of_stock']:.0%} of stock"
                f" {row['stock_ms']}; without turn {row['without_turn_ms']:.3f}; triton {row['triton_ms']:.3f}; tasks {row['tasks']}"
            )
    for name in ("prefill_variants", "float8", "copies", "plan", "run"):
        print(
            name,
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in results.get(name, {}).items()
            },
        )


if __name__ == "__main__":
    main()
