# SPDX-License-Identifier: Apache-2.0
"""What reuse costs in answers, measured in the real engine: read measure.py first."""
