# SPDX-License-Identifier: Apache-2.0
"""How stored KV becomes valid at a new position: one method, one file."""
