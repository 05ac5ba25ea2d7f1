# SPDX-License-Identifier: Apache-2.0
"""A small run of every kernel, to be watched by compute-sanitizer.

PYTHONPATH=src:. compute-sanitizer --tool memcheck python3 benchmarks/sanitize_ops.py
"""

import torch
from tests.gpu import test_kernels as cases
from tests.ops.layouts import rotary_of


def main() -> None:
    """Run decode, prefill with and without masks, merge, store and turned copies once each, and check the results."""
    for head_dim, contiguous in ((128, True), (128, False), (80, False)):
        case = cases.random_case(
            5, chunk_lens=(5, 640, 100), queries=((0, 1), (3, 1), (10, 70)), num_q_heads=4, num_kv_heads=2,
            head_dim=head_dim, dtype=torch.bfloat16, contiguous=contiguous,
        )  # fmt: skip
        rotary = cases.on_gpu(rotary_of(head_dim))
        error = cases.relative_error(cases.run_case(case, rotary, 0.1), cases.oracle(case, rotary, 0.1))
        print(f"head_dim {head_dim}, contiguous {contiguous}: error {error:.2e}")
        assert error < 1e-2
    cases.test_variants_of_other_head_sizes({"keys_turned": False}, {}, {"window": 333}, 64, torch.bfloat16)
    cases.test_variants_of_other_head_sizes({}, {"is_interleaved": True}, {"softcap": 20.0}, 256, torch.float16)
    cases.test_float8_kv_of_other_layers(True, 128, {"window": 200})
    cases.test_copy_turned(128, {})
    cases.test_store_kv_turned()
    cases.test_merge_states()
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
