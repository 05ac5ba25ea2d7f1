# SPDX-License-Identifier: Apache-2.0
"""Named starting points: SIMU, its controls, and the baselines it is compared with. One line each."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lazyattention.errors import ConfigError
from lazyattention.unlearn.config import OptimizerConfig, UnlearnConfig
from lazyattention.utils.registry import Registry

_EVERYTHING_ADAMW = {
    "train.trainable": "everything",
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-5,
    "optimizer.weight_decay": 0.01,
}
# The curvature's factor is not known from the paper: it is set by the share of entries it clips.
_SECOND_ORDER = {"optimizer.clip_target": 0.7, "objective.retain_weight": 2.0}
_SOUL = {f"optimizer.{name}": value for name, value in asdict(OptimizerConfig.soul()).items()}

PRESETS: Registry[Mapping[str, Any]] = Registry("method")
_METHODS: dict[str, dict[str, Any]] = {
    # SIMU as readable: attention in full and attributed neurons, second order with sampled labels.
    "simu": _SECOND_ORDER,
    # Ours: only the neurons move, so the choice of neurons can matter.
    "simu-mlp": _SECOND_ORDER | {"train.attention": "frozen", "optimizer.lr": 1e-4},
    # Ours: SIMU on adapters, for one small GPU; exports as an exact adapter.
    "simu-lora": _SECOND_ORDER | {"train.attention": "lora", "optimizer.lr": 1e-4},
    # SIMU's trainable set under SOUL's published update rule.
    "simu-soul": _SOUL | {"optimizer.lr": 2e-5},
    "soul": _SOUL | {"train.trainable": "everything", "objective.retain_weight": 2.0},
    "graddiff": _EVERYTHING_ADAMW,
    "ga": _EVERYTHING_ADAMW | {"objective.name": "ga"},
    "kl": _EVERYTHING_ADAMW | {"objective.name": "kl"},
    "npo": _EVERYTHING_ADAMW | {"objective.name": "npo"},
    "simnpo": _EVERYTHING_ADAMW | {"objective.name": "simnpo"},
    "po": _EVERYTHING_ADAMW | {"objective.name": "po"},
    "undial": _EVERYTHING_ADAMW | {"objective.name": "undial"},
}
for _name, _options in _METHODS.items():
    PRESETS.register(_name, _options)

# Appended to a method with "+": what takes the place of attributed neurons.
CONTROLS: Registry[Mapping[str, Any]] = Registry("control")
_CONTROLS: dict[str, dict[str, Any]] = {
    "random": {"neurons.control": "random"},
    "none": {"neurons.control": "none"},
    "all": {"neurons.control": "all"},
    "contrast": {"attribution.contrast": True},
    "fast": {"attribution.path": "fast"},
    "literal": {"attribution.sign": "literal"},
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 1e-5, "optimizer.weight_decay": 0.01},
}
for _name, _options in _CONTROLS.items():
    CONTROLS.register(_name, _options)


def preset(name: str, base: UnlearnConfig | None = None, overrides: Mapping[str, Any] | None = None) -> UnlearnConfig:
    """Build the configuration called `name`, for example "simu", "soul" or "simu+random".

    Args:
        name: A method and, after "+", any number of controls.
        base: What the method's options are put on; None = defaults.
        overrides: Dotted options that win over the method's.

    Raises:
        ConfigError: An unknown method or control, or options that do not fit together.
    """
    method, *controls = name.split("+")
    options: dict[str, Any] = dict(PRESETS[method])
    for control in controls:
        if options.get("train.trainable") == "everything":
            raise ConfigError(f"{name!r}: {method!r} trains every weight, so {control!r} changes nothing; leave it out")
        options |= CONTROLS[control]
    return (base or UnlearnConfig()).with_options({**options, **(overrides or {})})
