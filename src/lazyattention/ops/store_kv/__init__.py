# SPDX-License-Identifier: Apache-2.0
"""Write new keys and values into the paged pool."""

from lazyattention.ops.store_kv.op import store_kv

__all__ = ["store_kv"]
