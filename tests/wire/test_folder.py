import os

import pytest
import torch

from farl.errors import WireError
from farl.wire import folder
from farl.wire.folder import load_tensors, save_tensors


def test_round_trip_of_views_and_dtypes(tmp_path):
    tensors = {
        "a": torch.arange(12.0).reshape(3, 4).T, "b": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.arange(5, dtype=torch.uint8), "d": torch.tensor(3.0),
    }  # fmt: skip
    save_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.zeros(2)})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "flush_to_disk", full)
    with pytest.raises(WireError, match="No space left on device"):
        save_tensors(path, {"a": torch.ones(2)})
    assert load_tensors(path)["a"].tolist() == [0, 0]
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(WireError, match="cannot read"):
        load_tensors(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(WireError, match=r"bad.safetensors: cannot read"):
        load_tensors(tmp_path / "bad.safetensors")
