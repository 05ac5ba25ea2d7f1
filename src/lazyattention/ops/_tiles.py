# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the kernels by GPU and head_dim: measured once, kept here, never searched for at run time."""

import functools
from dataclasses import dataclass

import torch

from lazyattention.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a kernel cuts its work.

    Attributes:
        tile_m: Query rows times query heads per KV head in one program; a power of two, at least 16.
        tile_kv: Keys per step of its loop; a power of two, at least 16.
        num_warps: Warps per program.
        num_stages: Depth of the load pipeline.
        programs_per_multiprocessor: Programs that share all the work; 0 = one program per piece of work.
        max_registers: Registers per thread the compiler may use, so that more programs fit; 0 = as it likes.
    """

    tile_m: int
    tile_kv: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int = 0
    max_registers: int = 0

    @property
    def launch_options(self) -> dict[str, int]:
        """What Triton is told at the launch, besides constants."""
        registers = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, **registers}


# Warps of one program of merge_states.
MERGE_WARPS = 1
# Of the stream on which shared_decode reads ranges with many rows, as CUDA counts: 0 as usual, -1 before others.
SIDE_PRIORITY = -1


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shapes for one head_dim.

    Attributes:
        decode_few: shared_decode when ranges have few rows each.
        decode_many: shared_decode when many rows share ranges.
        decode_unturned: shared_decode over keys stored unturned.
        prefill: chunk_prefill over keys stored turned.
        prefill_unturned: chunk_prefill over keys stored unturned.
        prefill_min_rows: Rows of one request (tokens times query heads per KV head) from which it goes to
            chunk_prefill.
    """

    decode_few: TileShape
    decode_many: TileShape
    decode_unturned: TileShape
    prefill: TileShape
    prefill_unturned: TileShape
    prefill_min_rows: int = 64


# Largest padded head_dim -> tiles, 16-bit KV, measured on an H200: docs/kernels.md.
_TILES = {
    64: Tiles(
        decode_few=TileShape(16, 64, 4, 2),
        decode_many=TileShape(64, 128, 4, 2, 1),
        decode_unturned=TileShape(16, 64, 4, 2),
        prefill=TileShape(128, 128, 8, 3),
        prefill_unturned=TileShape(128, 64, 8, 2),
    ),
    128: Tiles(
        decode_few=TileShape(16, 64, 4, 2),
        decode_many=TileShape(64, 128, 4, 2, 1),
        decode_unturned=TileShape(16, 32, 4, 2),
        prefill=TileShape(128, 128, 8, 2),
        prefill_unturned=TileShape(128, 32, 8, 2),
    ),
    256: Tiles(
        decode_few=TileShape(16, 32, 4, 2),
        decode_many=TileShape(64, 32, 4, 3, 1),
        decode_unturned=TileShape(16, 16, 4, 2),
        prefill=TileShape(128, 64, 8, 2),
        prefill_unturned=TileShape(64, 16, 4, 2),
    ),
}
# Likewise for GPUs whose programs have at most 100 KB of shared memory; chosen to fit, not measured.
_SMALL_MEMORY_BYTES = 160 * 1024
_SMALL_TILES = {
    padded: Tiles(
        decode_few=TileShape(16, 32 if padded == 256 else 64, 4, 2),
        decode_many=TileShape(32 if padded == 256 else 64, 32, 4, 2),
        decode_unturned=TileShape(16, 16 if padded == 256 else 32, 4, 2),
        prefill=TileShape(64, 16 if padded == 256 else 32, 4, 2),
        prefill_unturned=TileShape(64, 16 if padded == 256 else 32, 4, 2),
    )
    for padded in _TILES
}
# float32 is for tests: half the keys per step, so that shared memory suffices.
_FLOAT32_TILES = Tiles(
    decode_few=TileShape(16, 16, 4, 2),
    decode_many=TileShape(32, 16, 4, 2),
    decode_unturned=TileShape(16, 16, 4, 2),
    prefill=TileShape(32, 16, 4, 2),
    prefill_unturned=TileShape(32, 16, 4, 1),
)
# The interpreter: small tiles, so that small tests have several.
_INTERPRETED_TILES = Tiles(
    decode_few=TileShape(16, 16, 4, 1),
    decode_many=TileShape(64, 32, 4, 1, 1),
    decode_unturned=TileShape(16, 16, 4, 1),
    prefill=TileShape(32, 16, 4, 1),
    prefill_unturned=TileShape(16, 32, 4, 1),
    prefill_min_rows=32,
)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def tiles_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Return the tile shapes for heads of this size and dtype.

    Raises:
        UnsupportedError: No kernel holds heads this large.
    """
    if device.type != "cuda":
        return _INTERPRETED_TILES
    if dtype.itemsize > 2:
        return _FLOAT32_TILES
    padded = max(64, next_power_of_2(head_dim))
    if padded not in _TILES:
        raise UnsupportedError(f"head_dim {head_dim} is too large for the GPU kernels, which hold up to {max(_TILES)}")
    return (_SMALL_TILES if _shared_memory_bytes(device) < _SMALL_MEMORY_BYTES else _TILES)[padded]


@functools.lru_cache
def _shared_memory_bytes(device: torch.device) -> int:
    # Imported here: triton does not come with CPU builds of torch.
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many programs of full size the device runs at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
