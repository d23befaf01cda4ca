import json
import shutil

import pytest
import torch

from farl.errors import CheckpointError
from farl.runtime import state as module
from farl.runtime.state import CheckpointStore, flatten_optimizer, restore_optimizer

TENSORS = {"model": {"w": torch.arange(6.0)}, "empty": {}, "optimizer": {"0.exp_avg": torch.ones(2, 2)}}
RECORDS = {"loop": {"next_batch": 3, "x": 0.1 + 0.2}, "history": [{"a": 1}]}


def test_round_trip_and_only_the_newest_stay(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    assert store.latest() is None
    for step in (1, 5, 12):
        store.save(step, {"model": {"w": torch.full((2,), float(step))}}, {"step": step})
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_00000005", "step_00000012"]
    assert store.latest() == 12
    tensors, records = store.load(5)
    assert tensors["model"]["w"].tolist() == [5, 5]
    assert records == {"step": 5}


def test_records_and_tensors_are_exact(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(0, TENSORS, RECORDS)
    tensors, records = store.load(0)
    assert records == RECORDS
    assert set(tensors) == {"model", "optimizer"}
    assert torch.equal(tensors["model"]["w"], TENSORS["model"]["w"])


@pytest.mark.parametrize("file", ["manifest.json", "records.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_noticed_and_an_earlier_checkpoint_found(tmp_path, file, damage):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, TENSORS, RECORDS)
    store.save(2, TENSORS, RECORDS)
    path = tmp_path / "step_00000002" / file
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-3] if damage == "cut" else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(CheckpointError, match="damaged"):
        store.load(2)
    assert store.latest() == 1


def test_a_full_disk_leaves_earlier_checkpoints_intact(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, TENSORS, RECORDS)

    def full(path, text):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_text", full)
        with pytest.raises(
            CheckpointError, match=r"No space left on device; earlier checkpoints are intact. Free some"
        ):
            store.save(2, TENSORS, RECORDS)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert store.load(1)[1] == RECORDS
    store.save(2, TENSORS, RECORDS)
    assert store.latest() == 2


def test_a_crash_before_the_rename_leaves_nothing_that_counts(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, TENSORS, RECORDS)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / ".step_00000002.partial")
    assert store.latest() == 1
    store.save(2, TENSORS, RECORDS)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


def test_the_same_step_can_be_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, TENSORS, {"n": 1})
    store.save(3, TENSORS, {"n": 2})
    assert store.load(3)[1] == {"n": 2}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_survive_to_the_bit(name):
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(4))

    def make(parameter):
        if name == "adamw":
            return torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9))
        return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    optimizer = make(w)
    for _ in range(3):
        w.grad = torch.randn(4)
        optimizer.step()
    tensors, record = flatten_optimizer(optimizer.state_dict())
    tensors = {n: t.clone() for n, t in tensors.items()}
    other = torch.nn.Parameter(w.detach().clone())
    resumed = make(other)
    resumed.load_state_dict(restore_optimizer(tensors, json.loads(json.dumps(record))))
    for _ in range(2):
        w.grad = torch.randn(4)
        other.grad = w.grad.clone()
        optimizer.step()
        resumed.step()
    assert torch.equal(w, other)
