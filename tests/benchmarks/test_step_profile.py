# SPDX-License-Identifier: Apache-2.0
"""The profile of a step names groups of kernels and runs without a GPU, where there are none."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from random_models import random_model
from step_profile import group_of, profile_step, profile_table

from lazyattention import EngineConfig
from lazyattention.engine.engine import Engine
from lazyattention.reuse import PromptLayout


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("_shared_decode_kernel", "attention"),
        ("_merge_parts_kernel", "attention"),
        ("_store_kv_kernel", "store_kv"),
        ("_copy_turned_kernel", "copy and turn"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "linear layers"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "linear layers"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms, activation, rotary"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1>", "sampling and the rest"),
    ],
)
def test_kernels_are_grouped(kernel, group):
    assert group_of(kernel) == group


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_step_is_profiled():
    engine = Engine(random_model("tiny"), EngineConfig.of(num_blocks=64))
    engine.add_request("profiled", PromptLayout.of_text([5, 6, 7]))
    result = profile_step(engine)
    assert engine.stats.num_steps == 1
    assert result["wall_ms"] > 0
    assert "| group | ms |" in profile_table("One step", result)
