# SPDX-License-Identifier: Apache-2.0
"""Documents: reading, splitting and retrieving them. No tensors, no models."""
