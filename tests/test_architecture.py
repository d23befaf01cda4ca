"""Imports point only downward, each framework has one importer, and `import farl` needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "farl"

# layer -> layers it may import (its own is implied)
ALLOWED = {
    "errors": set(),
    "core": {"errors"},
    "forecast": {"core", "errors"},
    "correct": {"core", "errors"},
    "testing": {"correct", "errors"},
    "wire": {"core", "errors"},
    "tasks": {"core", "errors"},
    "engines": {"core", "errors"},
    "runtime": {"forecast", "correct", "wire", "core", "errors"},
    "recipes": set(),
    "config": {"engines", "runtime", "tasks", "errors"},
    "build": {"config", "core", "engines", "runtime", "tasks", "wire"},
    "worker": {"build", "config", "runtime", "wire"},
    "train": {"", "build", "config", "errors", "runtime"},
    "cli": {"config", "correct", "errors", "forecast", "tasks", "train"},
    "__main__": {"cli"},
    "": {"correct", "forecast", "core", "errors"},
}
ONE_IMPORTER = {
    "transformers": "engines/transformers_models.py",
    "tokenizers": "engines/transformers_models.py",
    "safetensors": "wire/folder.py",
    "reasoning_gym": "tasks/reasoning_gym.py",
    "math_verify": "tasks/math.py",
    "rich": "runtime/display.py",
    "pydantic": "config.py",
    "tyro": "config.py",
    "tensorboard": None,
}


def layer_of(path):
    parts = path.relative_to(SRC).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "farl":
                yield from (f"farl.{alias.name}" for alias in node.names)


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_downward(path):
    own = layer_of(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "farl" or name == "farl":
            continue
        target = parts[1]
        assert target == own or target in ALLOWED[own], f"{own or 'farl'} must not import {name}"


def test_each_framework_is_imported_in_one_module():
    users = {name: [] for name in ONE_IMPORTER}
    for path in FILES:
        for name in {n.split(".")[0] for n in imported(path)} & users.keys():
            users[name].append(str(path.relative_to(SRC)))
    assert {name: files[0] if len(files) == 1 else files or None for name, files in users.items()} == ONE_IMPORTER


def test_modules_stay_readable():
    lengths = {str(p.relative_to(SRC)): len(p.read_text().splitlines()) for p in FILES}
    assert {name: n for name, n in lengths.items() if n > 420} == {}
    assert all(ast.get_docstring(ast.parse(p.read_text())) for p in FILES)


def test_nothing_is_unpickled():
    for path in FILES:
        names = set(imported(path))
        assert not names & {"pickle", "dill", "cloudpickle", "shelve", "marshal"}, path
        assert "torch.load" not in path.read_text(), path


def test_import_farl_needs_torch_alone():
    code = """
import sys, types
allowed = ("torch", "farl")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in %r:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import farl, farl.forecast, farl.correct, farl.wire
print(sorted(farl.__all__))
"""
    banned = [*ONE_IMPORTER, "gguf", "accelerate"]
    out = subprocess.run([sys.executable, "-c", code % (banned,)], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert "Forecaster" in out.stdout
