# SPDX-License-Identifier: Apache-2.0
"""One launch of the two attention kernels at full size, to be watched by ncu.

PYTHONPATH=src ncu --clock-control none --metrics METRICS -k regex:"shared_decode|chunk_prefill" python3 benchmarks/profile_ops.py
"""

import bench_ops
import torch


def main() -> None:
    """Launch decode (64 requests, uniform) and prefill (2,048 rows over 16K keys) twice each."""
    decode = bench_ops.make_problem(bench_ops.zipf_requests(64, 10, 1000, 0.0), 1000, 512)
    prefill = bench_ops.prefill_problem(2048, 16384)
    for problem in (decode, prefill):
        _, launches = problem.launches(problem.spec())
        launches["attend"]()
        launches["attend"]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
