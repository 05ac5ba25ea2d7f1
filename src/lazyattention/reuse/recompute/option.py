# SPDX-License-Identifier: Apache-2.0
"""Recompute policies by name, and the option that names one: "first:16", "deviation:0.15", "attention:0.15"."""

from dataclasses import dataclass

from lazyattention.errors import ConfigError, RequestError
from lazyattention.reuse.recompute.attention import Attention
from lazyattention.reuse.recompute.base import RecomputePolicy
from lazyattention.reuse.recompute.deviation import Deviation
from lazyattention.reuse.recompute.first import First
from lazyattention.utils.registry import Registry

RECOMPUTE_POLICIES: Registry[RecomputePolicy] = Registry("recompute policy")
for _policy in (First(), Deviation(), Attention()):
    RECOMPUTE_POLICIES.register(_policy.name, _policy)

NO_RECOMPUTE = "none"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which blocks of stored documents a request computes anew, after everything that stands before them.

    Attributes:
        policy: Name of a recompute policy.
        amount: How much; its meaning is the policy's.
    """

    policy: str
    amount: float

    def __post_init__(self) -> None:
        RECOMPUTE_POLICIES[self.policy].check(self.amount)

    @classmethod
    def of(cls, value: "Recompute | str | None") -> "Recompute | None":
        """Read an option: "first:16", "deviation:0.15", "attention:0.15"; None and "none" mean nothing is recomputed.

        Raises:
            RequestError: It is not of this form, the policy is unknown, or the amount is not allowed.
        """
        if value is None or isinstance(value, Recompute):
            return value
        if value == NO_RECOMPUTE:
            return None
        name, _, amount = value.partition(":") if isinstance(value, str) else ("", "", "")
        try:
            number = float(amount)
            RECOMPUTE_POLICIES[name]
        except ConfigError as error:
            raise RequestError(str(error)) from error
        except ValueError:
            known = "; ".join(f"{policy.name}:N ({policy.amount_help})" for policy in RECOMPUTE_POLICIES.values())
            raise RequestError(f"recompute must be none or one of {known}; got {value!r:.80}") from None
        return cls(name, number)

    def __str__(self) -> str:
        return f"{self.policy}:{self.amount:g}"
