"""Options are checked when they are given, and a misspelt one is named."""

import dataclasses

import pytest

from lazyattention.config import CacheConfig, ChunkOptions, EngineConfig, SchedulerConfig
from lazyattention.errors import ConfigError


def test_flat_options_reach_their_part():
    config = EngineConfig.of(block_size=32, max_num_seqs=3, reuse_method="prefix")
    assert (config.cache.block_size, config.scheduler.max_num_seqs, config.reuse_method) == (32, 3, "prefix")


def test_flat_options_keep_what_the_base_says():
    base = EngineConfig(cache=CacheConfig(num_blocks=7))
    assert EngineConfig.of(base, block_size=4).cache == CacheConfig(num_blocks=7, block_size=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blok_size": 16}, "unknown option 'blok_size'. Did you mean 'block_size'"),
        ({"block_size": 24}, "block_size must be a power of two, got 24"),
        ({"block_size": 0}, "block_size must be a positive number, got 0"),
        ({"max_loss": float("nan")}, "max_loss must be a positive number, got nan"),
        ({"num_blocks": True}, "num_blocks must be a positive number, got True"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens must be a positive number, got 'many'"),
        ({"encoding": "alone"}, "encoding must be one of after_preamble, isolated, got 'alone'"),
        ({"chat_template": "plian"}, "chat_template must be 'plain' or a Jinja template, got 'plian'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [CacheConfig, SchedulerConfig, ChunkOptions, EngineConfig])
def test_every_option_has_a_help_text(kind):
    for field in dataclasses.fields(kind):
        assert field.name in ("cache", "scheduler", "chunk") or field.metadata["help"].endswith(".")
