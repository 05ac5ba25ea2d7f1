# SPDX-License-Identifier: Apache-2.0
"""Reuse methods by name."""

from lazyattention.reuse.base import ReuseMethod
from lazyattention.reuse.chunk_recompute import ChunkRecompute
from lazyattention.reuse.copy_rotate import CopyRotate
from lazyattention.reuse.full_recompute import FullRecompute
from lazyattention.reuse.prefix import Prefix
from lazyattention.reuse.rotate_key import RotateKey
from lazyattention.reuse.rotate_query import RotateQuery
from lazyattention.utils.registry import Registry

REUSE_METHODS: Registry[ReuseMethod] = Registry("reuse method")
for _method in (RotateQuery(), RotateKey(), CopyRotate(), ChunkRecompute(), Prefix(), FullRecompute()):
    REUSE_METHODS.register(_method.name, _method)
