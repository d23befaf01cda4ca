"""Off-policy correctors: pure functions from log-probs and advantages to a loss.

A corrector is five independent choices: which policies are compared (ratio), the unit (token or sequence), what is
done to it (clip, weight, mask), the surrogate, and the reduction with its denominator. `catalogue` names the
published combinations; each is also a plain function here: `farl.correct.ppo(...)` returns a scalar loss.

Policies: learner (trained), behaviour (sampled the token), proximal (anchor of the trust region), reference (frozen
regulariser). Suffixes: B sequences, T completion positions.
"""

from farl.correct.base import Corrector, LossInputs, LossOutput, Need
from farl.correct.catalogue import CORRECTORS, CorrectorConfig, make_corrector
from farl.correct.diagnose import diagnose
from farl.correct.functional import dapo, decoupled_ppo, none, ppo, tis
from farl.correct.reduce import Denominator, Reduction

__all__ = [
    "CORRECTORS",
    "Corrector",
    "CorrectorConfig",
    "Denominator",
    "LossInputs",
    "LossOutput",
    "Need",
    "Reduction",
    "dapo",
    "decoupled_ppo",
    "diagnose",
    "make_corrector",
    "none",
    "ppo",
    "tis",
]
