"""One contract for both transports, and what only shared memory has to survive."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from farl.core.types import PolicyStamp
from farl.errors import ConfigError, WireError
from farl.wire import InProcessTransport, SharedMemoryReceiver, SharedMemoryTransport, layout_of
from farl.wire.layout import Layout, spec_of
from farl.wire.shared_memory import remove_abandoned

SPEC = [("a.weight", (3, 5)), ("b", (7,)), ("scalar", ())]
STAMP = PolicyStamp(base_version=3, target_version=5, rule="copy", coefficients=(0.5, 1 / 3))


def leaves(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SPEC}


@pytest.fixture(params=["memory", "shared"])
def transport(request, tmp_path):
    made = (
        InProcessTransport(layout_of(SPEC))
        if request.param == "memory"
        else SharedMemoryTransport(layout_of(SPEC), folder=tmp_path)
    )
    yield made
    made.close()
    made.close()
    assert not list(tmp_path.glob("farl-*"))


def received(transport, descriptor):
    stamp, views = transport.receive(json.loads(json.dumps(descriptor)))
    return stamp, {name: view.clone() for name, view in views}


def test_what_was_sent_arrives_to_the_bit(transport):
    descriptor = transport.send(4, STAMP, leaves().items())
    stamp, got = received(transport, descriptor)
    assert stamp == STAMP
    assert list(got) == [name for name, _ in SPEC]
    assert all(torch.equal(got[n], leaf) for n, leaf in leaves().items())


def test_publications_live_side_by_side_until_released(transport):
    first = transport.send(1, STAMP, leaves(1).items())
    second = transport.send(2, STAMP, leaves(2).items())
    assert torch.equal(received(transport, first)[1]["b"], leaves(1)["b"])
    assert torch.equal(received(transport, second)[1]["b"], leaves(2)["b"])
    transport.release(1)
    transport.release(1)
    third = transport.send(3, STAMP, leaves(3).items())
    with pytest.raises(WireError, match="publication"):
        received(transport, first)
    assert torch.equal(received(transport, third)[1]["b"], leaves(3)["b"])


def test_a_number_in_use_is_refused(transport):
    transport.send(1, STAMP, leaves().items())
    with pytest.raises(WireError, match="publication=1: already published"):
        transport.send(1, STAMP, leaves().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("b"), "1 missing, first 'b'"),
        (lambda d: d.update(c=torch.zeros(1)), "leaf 'c': not in the layout"),
        (lambda d: d.update(b=torch.zeros(6)), r"leaf 'b': shape \(6,\), the layout has \(7,\)"),
    ],
)
def test_leaves_that_do_not_fit_are_refused_and_nothing_is_published(transport, change, words):
    wrong = leaves()
    change(wrong)
    with pytest.raises(WireError, match=words):
        transport.send(1, STAMP, wrong.items())
    descriptor = transport.send(1, STAMP, leaves(9).items())
    assert torch.equal(received(transport, descriptor)[1]["b"], leaves(9)["b"])


def test_the_wire_dtype_is_applied(tmp_path):
    for dtype in ("bfloat16", "float16"):
        transport = SharedMemoryTransport(layout_of(SPEC, dtype=dtype), folder=tmp_path)
        _, got = received(transport, transport.send(0, STAMP, leaves().items()))
        assert torch.equal(got["b"], leaves()["b"].to(getattr(torch, dtype)))
        transport.close()


def test_layouts():
    layout = layout_of(SPEC, dtype="bfloat16")
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert [leaf.offset for leaf in layout.leaves] == [0, 64, 128]
    assert layout.num_bytes == 192
    tied = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)])
    tied[1].weight = tied[0].weight
    assert spec_of(tied) == [("0.weight", (3, 2)), ("0.bias", (3,)), ("1.bias", (3,))]
    with pytest.raises(ConfigError, match="dtype='int8'"):
        layout_of(SPEC, dtype="int8")
    with pytest.raises(ConfigError, match="each once"):
        layout_of([("a", (1,)), ("a", (2,))])


@pytest.fixture
def shared(tmp_path):
    transport = SharedMemoryTransport(layout_of(SPEC), folder=tmp_path)
    yield transport
    transport.close()


def test_every_flipped_byte_is_noticed(shared):
    descriptor = shared.send(1, STAMP, leaves().items())
    path = Path(descriptor["path"])
    good = path.read_bytes()
    payload = len(good) - layout_of(SPEC).num_bytes
    positions = [0, 8, 16, 24, 32, 40, 48, 60, payload, payload + 9, payload + 64, len(good) - 60]
    for position in positions:
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([good[position] ^ 0xFF]))
        with pytest.raises((WireError, ValueError)):
            received(SharedMemoryReceiver(), descriptor)
        path.write_bytes(good)
    received(SharedMemoryReceiver(), descriptor)


def test_a_half_written_set_cannot_be_loaded(shared):
    descriptor = shared.send(1, STAMP, leaves().items())
    shared.release(1)

    def stopping():
        yield "a.weight", leaves()["a.weight"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared.send(2, STAMP, stopping())
    with pytest.raises(WireError, match="is not complete"):
        received(SharedMemoryReceiver(), descriptor)


def test_the_wrong_number_cannot_be_loaded(shared):
    descriptor = shared.send(1, STAMP, leaves().items())
    with pytest.raises(WireError, match="holds publication 1"):
        received(SharedMemoryReceiver(), {**descriptor, "publication": 2})
    with pytest.raises(WireError, match="cannot open"):
        received(SharedMemoryReceiver(), {**descriptor, "path": descriptor["path"] + "x"})


def test_a_file_taken_back_while_it_is_read_is_noticed(shared):
    descriptor = shared.send(1, STAMP, leaves().items())
    _, views = SharedMemoryReceiver().receive(descriptor)
    next(views)
    shared.release(1)
    shared.send(2, STAMP, leaves(1).items())
    with pytest.raises(WireError, match="holds publication 2"):
        list(views)


def test_released_files_are_used_again(shared, tmp_path):
    for number in range(5):
        shared.send(number, STAMP, leaves(number).items())
        shared.release(number)
    assert len(list(tmp_path.glob("farl-*"))) == 1


def test_a_folder_without_room_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    transport = SharedMemoryTransport(layout_of(SPEC), folder=tmp_path)
    with pytest.raises(WireError, match="No space left on device.*--shm-size"):
        transport.send(0, STAMP, leaves().items())
    assert not list(tmp_path.glob("farl-*"))
    with pytest.raises(WireError, match="no such folder"):
        SharedMemoryTransport(layout_of(SPEC), folder=tmp_path / "none")


def test_files_of_dead_writers_are_removed_and_those_of_live_ones_stay(shared, tmp_path):
    shared.send(1, STAMP, leaves().items())
    code = f"""
        import os, torch
        from pathlib import Path
        from farl.core.types import PolicyStamp
        from farl.wire import SharedMemoryTransport, layout_of
        transport = SharedMemoryTransport(layout_of([("x", (4,))]), folder=Path({str(tmp_path)!r}))
        transport.send(0, PolicyStamp(base_version=0, target_version=0), [("x", torch.ones(4))])
        os._exit(9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert len(list(tmp_path.glob("farl-*"))) == 2
    assert remove_abandoned(tmp_path) == 1
    assert len(list(tmp_path.glob("farl-*"))) == 1


def test_another_process_reads_what_was_sent(shared):
    descriptor = shared.send(7, STAMP, leaves().items())
    code = f"""
        from farl.wire import SharedMemoryReceiver
        stamp, views = SharedMemoryReceiver().receive({dict(descriptor)!r})
        print(stamp.target_version, sum(float(v.double().sum()) for _, v in views))
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    version, total = out.stdout.split()
    assert int(version) == 5
    assert float(total) == pytest.approx(sum(float(v.double().sum()) for v in leaves().values()))


def test_readers_cannot_change_what_others_read(shared):
    descriptor = shared.send(1, STAMP, leaves().items())
    _, views = SharedMemoryReceiver().receive(descriptor)
    for _, view in views:
        view.zero_()
    assert torch.equal(received(SharedMemoryReceiver(), descriptor)[1]["b"], leaves()["b"])
