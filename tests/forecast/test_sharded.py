"""Two ranks with sharded weights forecast as one rank that holds them whole."""

import datetime
import json
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import farl
from farl.errors import ConfigError
from farl.forecast import sharded

SETTINGS = {"lags": 3, "max_horizon": 2, "metric": "sharp", "sharp_fraction": 0.5, "history_dtype": "float32"}


def make_model():
    torch.manual_seed(0)
    # 7 rows do not divide by 2: one rank holds more than the other
    return nn.Sequential(nn.Linear(12, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 3))


def run(model, forecaster, optimizer, steps=14, rank=0, world=1):
    """Each rank sees its half of every batch; returns coefficients, errors and the last forecast."""
    records = []
    for step in range(steps):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        part = x[rank::world]
        optimizer.zero_grad()
        (model(part) - part[:, :3].sin()).square().mean().backward()
        optimizer.step()
        seen = forecaster.observe()
        plan = forecaster.plan()
        forecaster.ship(plan)
        records.append([list(plan.coefficients), [s.error_ratio for s in seen.scored], seen.displacement])
    return records


def one_rank():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer, **SETTINGS)
    records = run(model, forecaster, optimizer)
    plan = forecaster.plan()
    return records, {n: w.clone() for n, w in forecaster.weights(plan=plan)}


def worker(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = make_model()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        forecaster = farl.Forecaster(model.named_parameters(), optimizer, **SETTINGS)
        records = run(model, forecaster, optimizer, rank=rank, world=2)
        plan = forecaster.plan()
        shards = dict(forecaster.weights(plan=plan))
        assert all(isinstance(w, DTensor) for w in shards.values())
        assert all(w.to_local().shape == model.get_parameter(n).to_local().shape for n, w in shards.items())
        into = {n: torch.empty_like(w.to_local()) for n, w in shards.items()}
        for n, w in forecaster.weights(plan=plan, into=into):
            assert w.to_local().data_ptr() == into[n].data_ptr()
            assert torch.equal(into[n], shards[n].to_local())
        held = sum(ring.values_CN.shape[1] for ring in forecaster.state.rings.values())
        whole = {n: w.clone() for n, w in forecaster.weights(plan=plan, gather=True)}
        model.reshard()
        before = {n: p.to_local().detach().clone() for n, p in model.named_parameters()}
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(99))
        exact = model(x).detach().clone()
        with forecaster.presented(shards.items(), module=model):
            ahead = model(x).detach().clone()
        assert torch.equal(model(x), exact)
        model.reshard()
        assert all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())
        saved = forecaster.state_dict()
        saved["record"] = json.loads(json.dumps(saved["record"]))
        again = farl.Forecaster(model.named_parameters(), optimizer, **SETTINGS)
        again.load_state_dict(saved)
        assert again.plan() == forecaster.plan()
        torch.save({"records": records, "whole": whole, "held": held, "ahead": ahead}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_ranks_under_fsdp2_equal_one(tmp_path):
    mp.spawn(worker, args=(free_port(), str(tmp_path)), nprocs=2)
    records, whole = one_rank()
    ranks = [torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1)]
    assert ranks[0]["records"] == ranks[1]["records"], "both ranks plan the same"
    for mine, theirs in zip(records, ranks[0]["records"], strict=True):
        assert theirs[0] == pytest.approx(mine[0], rel=1e-3, abs=1e-4)
        assert theirs[1] == pytest.approx(mine[1], rel=1e-3)
        assert theirs[2] == pytest.approx(mine[2], rel=1e-4)
    for name, weight in whole.items():
        for rank in ranks:
            assert torch.allclose(rank["whole"][name], weight, atol=2e-5), name
    total = sum(w.numel() for w in whole.values())
    assert ranks[0]["held"] + ranks[1]["held"] == total, "each rank keeps the history of its own shards alone"
    model = make_model()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(whole[name])
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(99))
    assert torch.allclose(ranks[0]["ahead"], model(x), atol=1e-4), "the forecast really acts through the wrapped model"


def mixed_worker(rank, port, folder):
    """Sharded, replicated and plain leaves on a 2-d mesh: sums count every entry once."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    try:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        full = {"sharded": torch.randn(6, 4), "replicated": torch.randn(5), "plain": torch.randn(3)}
        leaves = {
            "sharded": distribute_tensor(full["sharded"], mesh, [Replicate(), Shard(0)]),
            "replicated": distribute_tensor(full["replicated"], mesh, [Replicate(), Replicate()]),
            "plain": full["plain"],
        }
        replicas, reduce = sharded.layout(leaves)
        assert replicas == {"replicated": 2, "plain": 2}
        own = sum(float(sharded.local(t).square().sum()) / replicas.get(n, 1) for n, t in leaves.items())
        total = float(reduce(torch.tensor([own], dtype=torch.float64)))
        partial = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()])
        try:
            sharded.num_shards("p", partial)
        except ConfigError as error:
            message = str(error)
        torch.save({"total": total, "message": message}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_replicated_leaves_count_once_and_partial_ones_are_refused(tmp_path):
    mp.spawn(mixed_worker, args=(free_port(), str(tmp_path)), nprocs=2)
    torch.manual_seed(0)
    expected = sum(float(torch.randn(*shape).square().sum()) for shape in ((6, 4), (5,), (3,)))
    for rank in (0, 1):
        seen = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert seen["total"] == pytest.approx(expected, rel=1e-5)
        assert "only sharded or replicated weights are followed" in seen["message"]


def test_without_a_mesh_nothing_is_reduced():
    assert sharded.layout({"a": torch.zeros(3)}) == ({}, None)
