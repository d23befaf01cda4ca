"""Off-policy correctors: pure functions from log-probs and advantages to a loss.

A corrector is five independent choices: which policies are compared (ratio), the unit (token or sequence), what is
done to it (clip, weight, mask), the surrogate, and the reduction with its denominator. `catalogue` names the
published combinations, `create("ppo", clip_high=0.28)` builds one; each is also a plain function here:
`farl.correct.ppo(...)` returns a scalar loss.

Policies: learner (trained), behaviour (sampled the token), proximal (anchor of the trust region), reference (frozen
regulariser). Suffixes: B sequences, T completion positions.
"""

from farl.correct.base import Adaptation, BatchContext, Corrector, LossInputs, LossOutput, Need, Surrogate, Treatment
from farl.correct.catalogue import CORRECTORS, create, make_corrector
from farl.correct.diagnose import diagnose
from farl.correct.functional import (
    a3po,
    aspo,
    bapo,
    cispo,
    dapo,
    decoupled_ppo,
    dppo,
    dro,
    dual_clip_ppo,
    glm5,
    gmpo,
    gspo,
    icepop,
    m2po,
    matched_replay,
    mis,
    none,
    opmd,
    opsm,
    ppo,
    sapo,
    tis,
    topr,
    vcpo,
    vespo,
)
from farl.correct.options import CorrectorConfig
from farl.correct.reduce import Denominator, Reduction

__all__ = [
    "CORRECTORS",
    "Adaptation",
    "BatchContext",
    "Corrector",
    "CorrectorConfig",
    "Denominator",
    "LossInputs",
    "LossOutput",
    "Need",
    "Reduction",
    "Surrogate",
    "Treatment",
    "a3po",
    "aspo",
    "bapo",
    "cispo",
    "create",
    "dapo",
    "decoupled_ppo",
    "diagnose",
    "dppo",
    "dro",
    "dual_clip_ppo",
    "glm5",
    "gmpo",
    "gspo",
    "icepop",
    "m2po",
    "make_corrector",
    "matched_replay",
    "mis",
    "none",
    "opmd",
    "opsm",
    "ppo",
    "sapo",
    "tis",
    "topr",
    "vcpo",
    "vespo",
]
