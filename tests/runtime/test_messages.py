import math
import os
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farl.core.types import Group, PolicyStamp, Rollout
from farl.errors import WireError
from farl.runtime.messages import Channel

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12,
)  # fmt: skip


@contextmanager
def connected():
    here, fd = Channel.pair()
    there = Channel(fd)
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def ends():
    with connected() as both:
        yield both


@settings(max_examples=60, deadline=None)
@given(json_values)
def test_messages_arrive_as_they_were_sent(value):
    with connected() as (here, there):
        here.send({"type": "x", "value": value})
        assert there.recv(1.0) == {"type": "x", "value": value}


def test_large_messages_and_order_from_several_threads(ends):
    here, there = ends

    def talk(who):
        for n in range(5):
            here.send({"type": "t", "who": who, "n": n, "pad": "x" * 50_000})

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    got = [there.recv(5.0) for _ in range(15)]
    for thread in threads:
        thread.join()
    for i in range(3):
        assert [m["n"] for m in got if m["who"] == i] == list(range(5))


def test_nothing_to_read_returns_none_and_a_closed_end_raises(ends):
    here, there = ends
    assert there.recv(0.0) is None
    assert there.recv(0.01) is None
    here.send({"type": "last"})
    here.close()
    assert there.recv(None) == {"type": "last"}
    with pytest.raises(EOFError):
        there.recv(None)
    with pytest.raises(WireError, match="'late' cannot be sent"):
        there.send({"type": "late"})


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), b"bytes"])
def test_what_is_not_json_is_refused_by_the_sender(ends, value):
    here, _ = ends
    with pytest.raises(WireError, match="'x' cannot be sent"):
        here.send({"type": "x", "value": value})


@pytest.mark.parametrize(
    "raw", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00[]", b"\x02\x00\x00\x00{}", b"\x02\x00\x00\x00{{"]
)
def test_bytes_that_are_no_message_are_refused(raw):
    here, fd = Channel.pair()
    os.write(fd, raw)
    with pytest.raises(WireError):
        here.recv(1.0)
    os.close(fd)
    here.close()


def test_a_group_with_lost_log_probs_passes(ends):
    """Whatever the sampler reports is for the corrector to judge; it must not end a worker."""
    stamp = PolicyStamp(base_version=0, target_version=0)
    lost = Rollout(
        ids=(1, 2, 3), logp_behaviour=(-0.5, math.nan, -math.inf), finished=True, reward=1.0, text="", stamp=stamp
    )
    here, there = ends
    here.send({"type": "done", "groups": [Group(group_id=0, prompt_ids=(1,), rollouts=(lost,)).to_json()]})
    message = there.recv(1.0)
    first, *others = Group.from_json(message["groups"][0]).rollouts[0].logp_behaviour
    assert first == -0.5
    assert all(math.isnan(x) for x in others)
