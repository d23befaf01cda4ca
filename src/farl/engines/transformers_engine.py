"""Sampling from, and log-probs under, a causal language model with the transformers calling convention.

Needs torch alone: the module is passed in. Prompts are computed once for all members of a group, in sampling and in
training. Suffixes: P prompts, L prompt positions (left padded), B sequences, T completion positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from farl.core.logprobs import token_logp
from farl.core.protocols import NamedTensors, SampleRequest, SamplingParams
from farl.core.types import Completion, PolicyStamp, TrainBatch
from farl.errors import TaskError, WireError

_COMPACT_BELOW = 0.75
"""Share of unfinished rows below which finished ones are dropped from the batch."""


class CausalPolicy:
    """The learner's policy over a causal language model.

    Args:
        module: called as `module(input_ids=, attention_mask=, position_ids=, past_key_values=, use_cache=)`; put
            into evaluation mode, since dropout would make recorded log-probs meaningless.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()

    def logp(self, batch: TrainBatch, *, temperature: float) -> Tensor:
        """Log-probs of the sampled tokens, float32 nats [B, T]; arbitrary but finite at padding.

        Each prompt is computed once for its whole group, gradient included: against the plain way this saves
        `(G - 1) / G` of the prompt's work.
        """
        prompt = self.module(
            input_ids=batch.prompt_ids_PL,
            attention_mask=batch.prompt_mask_PL.long(),
            position_ids=_positions(batch.prompt_mask_PL),
            use_cache=True,
            logits_to_keep=1,
        )
        ids_BT, rows_B = batch.completion_ids_BT, batch.group_B
        first_B1 = token_logp(prompt.logits[rows_B], ids_BT[:, :1], temperature=temperature)
        if ids_BT.shape[1] == 1:
            return first_B1
        cache = prompt.past_key_values
        cache.batch_select_indices(rows_B)
        prompt_mask_BL = batch.prompt_mask_PL[rows_B]
        mask = torch.cat([prompt_mask_BL, batch.mask_BT[:, :-1]], dim=1)
        steps_T = torch.arange(ids_BT.shape[1] - 1, device=ids_BT.device)
        rest = self.module(
            input_ids=ids_BT[:, :-1],
            attention_mask=mask.long(),
            position_ids=prompt_mask_BL.sum(dim=1, keepdim=True) + steps_T,
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat([first_B1, token_logp(rest.logits, ids_BT[:, 1:], temperature=temperature)], dim=1)


@dataclass
class _Row:
    """One completion in the making."""

    request: int
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    finished: bool = False


class TransformersSampler:
    """Draws completions with one decoding loop of its own, so that every log-prob is the one really sampled from.

    Args:
        module: as for `CausalPolicy`; `load` writes into it. It may be the learner's own, for evaluation.
        eos_ids: tokens that end a completion.
        pad_id: token to pad with.
        max_positions: longest sequence the model takes.
    """

    def __init__(self, module: nn.Module, *, eos_ids: frozenset[int], pad_id: int, max_positions: int) -> None:
        self._module = module.eval()
        self._eos_ids = torch.tensor(sorted(eos_ids))
        self._pad_id = pad_id
        self._max_positions = max_positions
        self._stamp: PolicyStamp | None = None

    @property
    def stamp(self) -> PolicyStamp | None:
        """Stamp of the weights held; None before the first complete `load`."""
        return self._stamp

    @torch.no_grad()
    def load(self, leaves: NamedTensors, stamp: PolicyStamp) -> None:
        """Copies every leaf into the module.

        Raises:
            WireError: if a leaf is missing, unknown or of another shape; nothing can be sampled until a later
                load succeeds.
        """
        self._stamp = None
        missing = dict(self._module.named_parameters())
        for name, leaf in leaves:
            target = missing.pop(name, None)
            if target is None or target.shape != leaf.shape:
                raise WireError(f"leaf {name!r} of shape {tuple(leaf.shape)}: does not fit the sampler's model")
            target.copy_(leaf)
        if missing:
            raise WireError(f"leaves: {len(missing)} missing, first {next(iter(missing))!r}")
        self._stamp = stamp

    @torch.inference_mode()
    def sample(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_token: Callable[[], None] | None = None,
    ) -> list[list[Completion]]:
        """Draws all requests in one padded batch; see `core.protocols.Sampler`.

        Each request draws from a generator of its own, the same numbers whoever its neighbours are.

        Raises:
            TaskError: if a prompt is empty or does not fit the context.
        """
        self._check(requests, params)
        rows = [_Row(request=i) for i, r in enumerate(requests) for _ in range(r.num_members)]
        generators = [torch.Generator().manual_seed(r.seed) for r in requests]
        prompt_ids_PL, prompt_mask_PL = _left_pad([r.prompt_ids for r in requests], self._pad_id)
        out = self._module(
            input_ids=prompt_ids_PL,
            attention_mask=prompt_mask_PL.long(),
            position_ids=_positions(prompt_mask_PL),
            use_cache=True,
            logits_to_keep=1,
        )
        source_B = torch.tensor([row.request for row in rows])
        cache = out.past_key_values
        cache.batch_select_indices(source_B)
        mask_BL = prompt_mask_PL[source_B].long()
        position_B = mask_BL.sum(dim=1)
        logits_BV = out.logits[:, -1][source_B]
        active = list(range(len(rows)))
        for step in range(params.max_new_tokens):
            uniform = [
                torch.rand(r.num_members, generator=g, dtype=torch.float64)
                for r, g in zip(requests, generators, strict=True)
            ]
            uniform_B = torch.cat(uniform)[active]
            ids_B, logp_B = draw(logits_BV, uniform_B, params)
            self._append(rows, active, ids_B, logp_B)
            if on_token:
                on_token()
            going = [i for i, b in enumerate(active) if not rows[b].finished]
            if not going or step + 1 == params.max_new_tokens:
                break
            if len(going) <= _COMPACT_BELOW * len(active):
                keep = torch.tensor(going)
                cache.batch_select_indices(keep)
                active = [active[i] for i in going]
                ids_B, mask_BL, position_B = ids_B[keep], mask_BL[keep], position_B[keep]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(active), 1)], dim=1)
            logits_BV = self._module(
                input_ids=ids_B.unsqueeze(1),
                attention_mask=mask_BL,
                position_ids=position_B.unsqueeze(1),
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
            position_B = position_B + 1
        return _by_request(rows, len(requests))

    def _append(self, rows: list[_Row], active: list[int], ids_B: Tensor, logp_B: Tensor) -> None:
        ends = torch.isin(ids_B, self._eos_ids).tolist()
        for b, token, logp, end in zip(active, ids_B.tolist(), logp_B.tolist(), ends, strict=True):
            row = rows[b]
            if not row.finished:
                row.ids.append(token)
                row.logp.append(logp)
                row.finished = end

    def _check(self, requests: Sequence[SampleRequest], params: SamplingParams) -> None:
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0:
                raise TaskError("prompt of 0 tokens: the model needs something to continue")
            if length + params.max_new_tokens > self._max_positions:
                raise TaskError(
                    f"prompt of {length} tokens: with rollout.max_new_tokens={params.max_new_tokens} it exceeds the "
                    f"model's context of {self._max_positions}; shorten the prompt or lower max_new_tokens"
                )


def draw(logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draws one token a row by inverting the cumulative distribution.

    Args:
        logits_BV: any float dtype.
        uniform_B: float64 in [0, 1).
        params: temperature 0 takes the most likely token; `top_p` keeps the smallest set of tokens whose mass
            reaches it.

    Returns:
        int64 ids [B] and float32 nats [B] under the distribution really drawn from.
    """
    logits_BV = logits_BV.float()
    if params.temperature == 0:
        ids_B = logits_BV.argmax(dim=-1)
        return ids_B, torch.zeros(len(ids_B))
    logp_BV = torch.log_softmax(logits_BV / params.temperature, dim=-1)
    if params.top_p < 1:
        logp_BV = _truncate(logp_BV, params.top_p)
    cumulative_BV = logp_BV.double().exp().cumsum(dim=-1)
    threshold_B1 = (uniform_B * cumulative_BV[:, -1]).unsqueeze(1)
    ids_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    return ids_B1.squeeze(1), logp_BV.gather(1, ids_B1).squeeze(1)


def _truncate(logp_BV: Tensor, top_p: float) -> Tensor:
    """Nucleus: tokens before which the sorted mass has already reached `top_p` get no mass; renormalised."""
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.double().exp().cumsum(dim=-1) - sorted_BV.double().exp()
    drop_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(1, order_BV, before_BV >= top_p)
    return torch.log_softmax(logp_BV.masked_fill(drop_BV, -torch.inf), dim=-1)


def _positions(mask_PL: Tensor) -> Tensor:
    return (mask_PL.long().cumsum(dim=1) - 1).clamp(min=0)


def _left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids_PL = torch.full((len(prompts), width), pad_id)
    mask_PL = torch.zeros(len(prompts), width, dtype=torch.bool)
    for p, prompt in enumerate(prompts):
        ids_PL[p, width - len(prompt) :] = torch.tensor(prompt)
        mask_PL[p, width - len(prompt) :] = True
    return ids_PL, mask_PL


def _by_request(rows: list[_Row], num_requests: int) -> list[list[Completion]]:
    grouped: list[list[Completion]] = [[] for _ in range(num_requests)]
    for row in rows:
        grouped[row.request].append(
            Completion(ids=tuple(row.ids), logp_behaviour=tuple(row.logp), finished=row.finished)
        )
    return grouped


def make_sampler(module: nn.Module, tokenizer: Any, max_positions: int) -> TransformersSampler:
    """A sampler with the tokenizer's end and padding tokens."""
    return TransformersSampler(module, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id, max_positions=max_positions)
