# SPDX-License-Identifier: Apache-2.0
"""Attention operations: plan once per step, run in every layer. Tensors only."""
