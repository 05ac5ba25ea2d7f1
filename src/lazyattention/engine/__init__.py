# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over documents whose KV is stored once."""
