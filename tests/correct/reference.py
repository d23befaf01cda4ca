"""Slow twins: token by token, as the papers write them, in plain Python floats.

Each returns the value of the loss. Where weights are detached the value is their sum with the score function, so equal
values on random inputs mean equal weights; `test_laws` proves that gradients are weights.
"""

import math


def sequences(inputs):
    """For each sequence: index, its valid positions."""
    for b in range(inputs.mask_BT.shape[0]):
        yield b, [t for t in range(inputs.mask_BT.shape[1]) if inputs.mask_BT[b, t]]


def logs(inputs, b, t):
    """lp, lm, lo of one token."""
    rows = (inputs.logp_learner_BT, inputs.logp_behaviour_BT, inputs.logp_proximal_BT)
    return tuple(row[b, t].item() for row in rows)


def advantage(inputs, b):
    return inputs.advantage_BT[b, 0].item()


def product(inputs, b, positions):
    return math.exp(sum(lp - lm for lp, lm, _ in (logs(inputs, b, t) for t in positions)))


def num_tokens(inputs):
    return int(inputs.mask_BT.sum())


def ppo_term(a, r, low, high, dual=None):
    loss = max(-a * r, -a * min(max(r, low), high))
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def a3po(inputs, cap=5.0):
    total = 0.0
    for b, positions in sequences(inputs):
        for t in positions:
            lp, lm, _ = logs(inputs, b, t)
            lag = inputs.lag_BT[b, t].item()
            share = (lag - 1) / lag if lag >= 1 else 0.0
            prox = lm + share * (lp - lm)
            weight = math.exp(prox - lm)
            if weight <= cap:
                total += weight * ppo_term(advantage(inputs, b), math.exp(lp - prox), 0.8, 1.2)
    return total / num_tokens(inputs)


def m2po(inputs, threshold=0.04):
    squares = [(logs(inputs, b, t)[0] - logs(inputs, b, t)[1]) ** 2 for b, p in sequences(inputs) for t in p]
    ordered = sorted(squares, reverse=True)
    while ordered and sum(ordered) / len(ordered) >= threshold:
        ordered.pop(0)
    largest_kept = ordered[0] if ordered else -1.0
    total = 0.0
    for b, positions in sequences(inputs):
        for t in positions:
            lp, lm, _ = logs(inputs, b, t)
            if (lp - lm) ** 2 <= largest_kept:
                total -= advantage(inputs, b) * math.exp(lp - lm)
    return total / num_tokens(inputs)


def bapo(inputs, target=1.0):
    tokens = []
    for b, positions in sequences(inputs):
        for t in positions:
            lp, lm, _ = logs(inputs, b, t)
            tokens.append((advantage(inputs, b), math.exp(lp - lm)))

    def enough(low, high):
        positive = sum(a * min(r, high) for a, r in tokens if a > 0)
        negative = sum(-a * max(r, low) for a, r in tokens if a < 0)
        return negative == 0 or positive / negative >= target

    low, high = 12, 24  # in units of 0.05
    while not enough(low / 20, high / 20) and low < 16:
        low += 1
    while not enough(low / 20, high / 20) and high < 40:
        high += 1
    return sum(ppo_term(a, r, low / 20, high / 20, 3.0) for a, r in tokens) / len(tokens)


def topr(inputs):
    total, count = 0.0, 0
    for b, positions in sequences(inputs):
        count += bool(positions)
        weight = 1.0 if inputs.reward_B[b].item() > 0 else min(product(inputs, b, positions), 1.0)
        total -= weight * advantage(inputs, b) * sum(logs(inputs, b, t)[0] for t in positions)
    return total / count


def vcpo(inputs):
    """Value with the optimal baseline of each group."""
    share = {}
    for b, positions in sequences(inputs):
        share[b] = (product(inputs, b, positions) * inputs.gradient_norm_B[b].item()) ** 2
    total, count = 0.0, 0
    for b, positions in sequences(inputs):
        mates = [c for c in share if inputs.group_B[c] == inputs.group_B[b]]
        weights = sum(share[c] for c in mates)
        baseline = sum(share[c] * inputs.reward_B[c].item() for c in mates) / weights
        if positions:
            count += 1
            total -= min(product(inputs, b, positions), 8.0) * (inputs.reward_B[b].item() - baseline)
    return total / count


def vcpo_step(inputs):
    products = [product(inputs, b, positions) for b, positions in sequences(inputs) if positions]
    ess = sum(products) ** 2 / sum(x * x for x in products)
    return math.sqrt(ess / len(products))


def vespo(inputs):
    total = 0.0
    for b, positions in sequences(inputs):
        x, a = product(inputs, b, positions), advantage(inputs, b)
        power, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        phi = x**power * math.exp(decay * (1 - x))
        total -= phi * a * sum(logs(inputs, b, t)[0] for t in positions)
    return total / num_tokens(inputs)


def aspo(inputs):
    total = 0.0
    for b, positions in sequences(inputs):
        a = advantage(inputs, b)
        for t in positions:
            r = math.exp(logs(inputs, b, t)[0] - logs(inputs, b, t)[1])
            if a > 0:
                total += -a * (1 / 1.2 if r > 1.2 else min(1 / r, 3.0))
            else:
                total += -a * (0.8 if r < 0.8 else min(r, 3.0))
    return total / num_tokens(inputs)


def opmd(inputs, tau=0.1):
    losses = [
        (advantage(inputs, b) - tau * math.log(product(inputs, b, positions))) ** 2
        for b, positions in sequences(inputs)
        if positions
    ]
    return sum(losses) / len(losses)


def glm5(inputs):
    total = 0.0
    for b, positions in sequences(inputs):
        for t in positions:
            lp, lm, _ = logs(inputs, b, t)
            r = math.exp(lp - lm)
            if 0.8 <= r <= 1.2:
                total -= r * advantage(inputs, b) * lp
    return total / num_tokens(inputs)


def matched_replay(inputs):
    total = 0.0
    for b, positions in sequences(inputs):
        for t in positions:
            lp, _, _ = logs(inputs, b, t)
            mix = sum(
                math.exp(share + source)
                for share, source in zip(
                    inputs.log_share_BK[b].tolist(), inputs.logp_sources_BTK[b, t].tolist(), strict=True
                )
            )
            total -= min(math.exp(lp) / mix, 2.0) * advantage(inputs, b) * lp
    return total / num_tokens(inputs)


def matched_replay_sequence(inputs):
    total = 0.0
    for b, positions in sequences(inputs):
        mix = sum(
            math.exp(share + sum(inputs.logp_sources_BTK[b, t, k].item() for t in positions))
            for k, share in enumerate(inputs.log_share_BK[b].tolist())
        )
        score = sum(logs(inputs, b, t)[0] for t in positions)
        total -= min(math.exp(score) / mix, 2.0) * advantage(inputs, b) * score
    return total / num_tokens(inputs)
