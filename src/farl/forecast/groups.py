"""Which weights share a coefficient vector, by the names that transformers give their leaves."""

from __future__ import annotations

import re

from farl.forecast.config import Grouping
from farl.forecast.plan import ALL

_LAYER = re.compile(r"\.(\d+)\.")
_KINDS = (  # first match wins: a norm inside attention is a norm
    ("norm", re.compile(r"norm|(^|[._])ln([._0-9]|$)", re.IGNORECASE)),
    ("embedding", re.compile(r"embed|lm_head|(^|\.)wte|(^|\.)wpe|unembed", re.IGNORECASE)),
    ("attention", re.compile(r"attn|attention", re.IGNORECASE)),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|expert|moe", re.IGNORECASE)),
)


def group_of(name: str, grouping: Grouping) -> str:
    """Group of a leaf: `all`; a kind of `_KINDS` or `other`; or `layer 12`, with `outside` for what is in no layer."""
    if grouping == "all":
        return ALL
    if grouping == "kind":
        return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")
    match = _LAYER.search(name)
    return f"layer {match[1]}" if match else "outside"
