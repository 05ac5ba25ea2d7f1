# SPDX-License-Identifier: Apache-2.0
"""chunk_prefill for Hopper GPUs, in Gluon: the part of the work that needs no mask and lies in consecutive slots."""
