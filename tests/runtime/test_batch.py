import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farl.core.types import Group, PolicyStamp, Rollout
from farl.errors import StateError
from farl.runtime.advantage import group_advantages
from farl.runtime.batch import make_batch
from farl.runtime.buffer import GroupBuffer


def make_group(group_id, rewards, *, base=3, target=4, prompt=(1, 2), lengths=None, errors=0):
    stamp = PolicyStamp(base_version=base, target_version=target)
    lengths = lengths or [2] * len(rewards)
    rollouts = tuple(
        Rollout(
            ids=tuple(range(10, 10 + n)), logp_behaviour=tuple(-0.5 - i for i in range(n)), finished=True,
            reward=r, text="", stamp=stamp,
        )
        for r, n in zip(rewards, lengths, strict=True)
    )  # fmt: skip
    return Group(group_id=group_id, prompt_ids=tuple(prompt), rollouts=rollouts, num_reward_errors=errors)


def test_advantages_by_hand():
    groups = [make_group(0, [1.0, 0.0, 0.0, 1.0]), make_group(1, [0.5, 0.5]), make_group(2, [1.0, 0.0], errors=1)]
    scaled, equal, failed = group_advantages(groups, divide_by_std=True)
    x = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # std of 1,0,0,1 with n - 1
    torch.testing.assert_close(scaled, torch.tensor([x, -x, -x, x, 0, 0, 0, 0]))
    assert (equal, failed) == (1, 1)
    plain, _, _ = group_advantages(groups, divide_by_std=False)
    torch.testing.assert_close(plain, torch.tensor([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]))


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_advantages_of_a_group_sum_to_zero(rewards):
    advantage, _, _ = group_advantages([make_group(0, rewards)], divide_by_std=False)
    assert abs(float(advantage.sum())) < 1e-4


def test_padding_lag_and_miss():
    groups = [
        make_group(4, [1.0, 0.0], prompt=(1, 2, 3), lengths=[1, 3]),
        make_group(5, [0.0, 1.0], prompt=(9,), lengths=[2, 2], base=5, target=5),
    ]
    batch = make_batch(groups, torch.tensor([1.0, -1.0, 2.0, -2.0]), version=6, pad_id=0)
    assert batch.prompt_ids_PL.tolist() == [[1, 2, 3], [0, 0, 9]]
    assert batch.prompt_mask_PL.tolist() == [[True, True, True], [False, False, True]]
    assert batch.completion_ids_BT.tolist() == [[10, 0, 0], [10, 11, 12], [10, 11, 0], [10, 11, 0]]
    assert batch.mask_BT.sum(1).tolist() == [1, 3, 2, 2]
    assert batch.group_B.tolist() == [0, 0, 1, 1]
    assert batch.logp_behaviour_BT[1].tolist() == [-0.5, -1.5, -2.5]
    assert batch.advantage_BT.tolist() == [[1, 0, 0], [-1, -1, -1], [2, 2, 0], [-2, -2, 0]]
    assert batch.lag_BT[:, 0].tolist() == [3, 3, 1, 1]
    assert batch.miss_BT[:, 0].tolist() == [2, 2, 1, 1]
    second = batch.select_groups(1, 2)
    assert second.group_B.tolist() == [0, 0]
    assert second.reward_B.tolist() == [0.0, 1.0]


def test_an_empty_completion_is_a_row_without_tokens():
    batch = make_batch([make_group(0, [1.0, 0.0], lengths=[0, 2])], torch.tensor([1.0, -1.0]), version=4, pad_id=0)
    assert batch.mask_BT.tolist() == [[False, False], [True, True]]
    assert batch.num_tokens == 2


def test_the_buffer_hands_out_whole_batches_in_order_and_takes_nothing_twice():
    buffer = GroupBuffer(groups_per_batch=2)
    groups = {i: make_group(i, [0.0, 1.0]) for i in range(4)}
    assert buffer.add(groups[3])
    assert buffer.add(groups[1])
    assert buffer.take(0) is None
    assert not buffer.add(groups[1])
    assert buffer.add(groups[0])
    assert buffer.take(0) == [groups[0], groups[1]]
    assert not buffer.add(groups[0]), "consumed before"
    assert buffer.num_duplicates == 2
    with pytest.raises(StateError, match="the next is 1"):
        buffer.take(0)
    other = GroupBuffer(groups_per_batch=2)
    other.restore(buffer.to_json())
    assert other.add(groups[2])
    assert other.take(1) == [groups[2], groups[3]]
    assert other.num_consumed == 4


def test_a_group_from_two_policies_is_refused():
    one, two = make_group(0, [1.0]), make_group(0, [0.0], base=4, target=5)
    mixed = Group(group_id=0, prompt_ids=(1,), rollouts=one.rollouts + two.rollouts)
    with pytest.raises(StateError, match="2 policy stamps; one frozen policy"):
        GroupBuffer(groups_per_batch=1).add(mixed)
