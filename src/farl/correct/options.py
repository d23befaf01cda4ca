"""The options of all correctors as one flat, checked record, as a recipe file writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from farl.correct.reduce import Denominator, Reduction


@dataclass(frozen=True, kw_only=True)
class CorrectorConfig:
    """A corrector and its options; None takes the authors' default. An option the corrector lacks is refused.

    Bounds say their space: `clip_low`, `clip_high` are offsets from a ratio of 1, `floor`, `cap`, `weight_cap`,
    `ratio_cap` absolute ratios, `log_cap` a log-ratio, `gap_low`, `gap_high` a probability or KL.

    Attributes:
        name: a name of `CORRECTORS`; a label only, with `import_from`.
        import_from: "package.module:factory" of a corrector of your own, called with `options`; in TOML the key is
            `import`.
        options: of an imported corrector: keyword arguments of its factory.
        anchor: policy in the differentiable ratio's denominator: "behaviour" or "proximal".
        clip_low: offset of the lower clip from 1.
        clip_high: offset of the upper clip from 1.
        dual_clip: bound on the loss of negative advantages, above 1.
        ratio_cap: of `ppo`: bound of the unclipped side (TRL `delta`); of `dppo`: cap of the score form's weight.
        log_cap: of `gmpo`: bound of token log-ratios.
        weight_cap: of `aspo`: bound of the weight.
        form: of `none` and `dppo`: "ratio" or "score"; of `gspo`: "token" or "direct"; of `opmd`: "squared" or "token".
        base: what a weight multiplies: "ppo" or "policy_gradient".
        level: unit of the weight: "token", "sequence" (product) or "geometric".
        floor: absolute lower bound of the weight.
        cap: absolute upper bound of the weight.
        cap_action: beyond the cap, "mask" drops the token, "clamp" sets the weight to the cap.
        normalise: of `tis`: divide weights by their mean over the batch.
        survivor: of `mis`: weight of what stays: the "unit"'s, the "token"'s own, or "one".
        inverse: of `mis`: the band is one of the inverse ratio.
        bounds: of `cispo`: whether clip_low and clip_high are "offset"s from 1 or "absolute" ratios.
        lag_zero: of `a3po`: the proximal policy of tokens without lag: "behaviour" or "learner".
        tau_positive: of `sapo`: temperature where A > 0.
        tau_negative: of `sapo`: temperature where A <= 0.
        target: of `bapo`: ratio of positive to negative contributions.
        lower_start: of `bapo`: first lower bound of the ratio.
        lower_stop: of `bapo`: last one.
        upper_start: of `bapo`: first upper bound of the ratio.
        upper_stop: of `bapo`: last one.
        bound_step: of `bapo`: step of the search.
        threshold: of `m2po`: bound on the mean squared log-ratio.
        statistic: of `m2po`: policy compared with the behaviour policy: "learner" or "proximal".
        divergence: of `dppo`: "tv" or "kl".
        gap_low: of `dppo`: largest move of tokens with A <= 0.
        gap_high: of `dppo`: largest move of tokens with A > 0.
        kl_penalty: of `dppo`: coefficient of the squared log-ratio.
        delta: of `opsm`: largest mean log-ratio, nats per token.
        split: of `topr`: "reward" or "advantage", whose sign tells positive from negative.
        zero_is_positive: of `topr`: where a value of 0 belongs.
        base_ess_fraction: of `vcpo`: ESS fraction from which the step is whole.
        step_scale: of `vcpo`: "sqrt", "linear" or "off".
        baseline: of `vcpo`: "optimal", or "given" to keep the advantages.
        divide_by_std: of `vcpo`: divide optimal-baseline advantages by the group's deviation.
        power_positive: of `vespo`, where A >= 0.
        decay_positive: of `vespo`, where A >= 0.
        power_negative: of `vespo`, where A < 0.
        decay_negative: of `vespo`, where A < 0.
        tau: of `opmd`: strength of the pull.
        beta: of `dro`: strength of the pull.
        heuristic: of `matched_replay`: "balance" or "own".
        reduction: a name of `farl.correct.reduce.REDUCTIONS`.
        denominator: "original" counts dropped tokens, "kept" does not.
        horizon: H of `sequence_mean_token_sum_norm`.
    """

    name: str = "none"
    import_from: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    anchor: Literal["behaviour", "proximal"] | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    log_cap: float | None = None
    weight_cap: float | None = None
    form: Literal["ratio", "score", "token", "direct", "squared"] | None = None
    base: Literal["ppo", "policy_gradient"] | None = None
    level: Literal["token", "sequence", "geometric"] | None = None
    floor: float | None = None
    cap: float | None = None
    cap_action: Literal["mask", "clamp"] | None = None
    normalise: bool | None = None
    survivor: Literal["unit", "token", "one"] | None = None
    inverse: bool | None = None
    bounds: Literal["offset", "absolute"] | None = None
    lag_zero: Literal["behaviour", "learner"] | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    target: float | None = None
    lower_start: float | None = None
    lower_stop: float | None = None
    upper_start: float | None = None
    upper_stop: float | None = None
    bound_step: float | None = None
    threshold: float | None = None
    statistic: Literal["learner", "proximal"] | None = None
    divergence: Literal["tv", "kl"] | None = None
    gap_low: float | None = None
    gap_high: float | None = None
    kl_penalty: float | None = None
    delta: float | None = None
    split: Literal["reward", "advantage"] | None = None
    zero_is_positive: bool | None = None
    base_ess_fraction: float | None = None
    step_scale: Literal["sqrt", "linear", "off"] | None = None
    baseline: Literal["optimal", "given"] | None = None
    divide_by_std: bool | None = None
    power_positive: float | None = None
    decay_positive: float | None = None
    power_negative: float | None = None
    decay_negative: float | None = None
    tau: float | None = None
    beta: float | None = None
    heuristic: Literal["balance", "own"] | None = None
    reduction: Reduction | None = None
    denominator: Denominator | None = None
    horizon: int | None = None

    def __post_init__(self) -> None:
        # Imported here: the catalogue reads this record, and a record that cannot work must not come to be.
        from farl.correct.catalogue import make_corrector

        if not self.import_from:
            make_corrector(self)
