# SPDX-License-Identifier: Apache-2.0
"""Which KV exists, where it lies, and who uses it."""
