"""Mathematical equality of answers; the only module that imports math_verify."""

from __future__ import annotations


def equivalent(gold: str, completion: str) -> bool:
    """Whether the answer found in a completion equals the gold answer.

    Without math-verify's own time limits: they use SIGALRM, which works in the main thread only.
    """
    from math_verify import parse, verify

    return bool(
        verify(
            parse(gold, parsing_timeout=None),
            parse(completion, parsing_timeout=None),
            timeout_seconds=None,
        )
    )
