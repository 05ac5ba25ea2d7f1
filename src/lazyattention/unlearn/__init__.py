# SPDX-License-Identifier: Apache-2.0
"""Make a model forget what it was trained on (SIMU and its baselines)."""
