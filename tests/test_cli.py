import pytest

from farl.cli import run
from farl.correct import CORRECTORS
from farl.forecast import FORECASTERS
from farl.tasks import TASKS


@pytest.mark.parametrize(
    ("kind", "names"),
    [("rules", FORECASTERS), ("correctors", CORRECTORS), ("tasks", TASKS), ("recipes", ["smollm2-arithmetic"])],
)
def test_lists(kind, names, capsys):
    assert run(["list", kind]) == 0
    out = capsys.readouterr().out
    for name in names:
        assert any(line.startswith(name) and len(line) > 25 for line in out.splitlines())


def test_correctors_are_listed_with_needs_defaults_and_source(capsys):
    assert run(["list", "correctors"]) == 0
    out = capsys.readouterr().out
    assert out.count("needs     ") == out.count("defaults  ") == out.count("source    ") == len(CORRECTORS)
    vcpo = out[out.index("vcpo ") :]
    assert "needs     batch_statistics, gradient_norm, group, reward" in vcpo
    assert "cap=8.0, base_ess_fraction=1.0, step_scale=sqrt" in vcpo
    assert "source    arXiv 2602.17616" in vcpo


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: farl train RECIPE"),
        (["fly"], "farl fly: no such command"),
        (["list", "cats"], "one of rules, correctors, recipes, tasks"),
        (["train"], "usage: farl train RECIPE"),
        (["train", "no-such-recipe"], "no such recipe; known: smollm2-arithmetic, tiny-addition"),
        (["train", "--resume"], "--resume: needs a value"),
        (["train", "--resume", "/no/run"], "holds no config.json"),
        (["train", "tiny-addition", "--resume", "/no/run"], "takes no other arguments"),
        (["train", "tiny-addition", "--forecast.rule", "magic"], "rule='magic': no such rule"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_clear_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--corrector", "pppo"], "corrector.name='pppo': no such corrector.name"),
        (["--corrector", "ppo", "--corrector.cap", "2"], "corrector.cap=2.0: ppo has no such option"),
        (["--corrector", "matched_replay", "--replay.policies", "1"], "weights by a mixture of policies"),
    ],
)
def test_a_corrector_that_cannot_work_is_refused_before_a_model_loads(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("farl.train.start", lambda *_, **__: pytest.fail("started"))
    try:
        status = run(["train", "tiny-addition", *arguments])
    except SystemExit as stop:  # tyro's own way out, after its own message
        status = stop.code
    assert status == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_help_exits_with_0(capsys):
    assert run(["--help"]) == 0
    assert run(["train", "--help"]) == 0
    with pytest.raises(SystemExit) as stop:
        run(["train", "tiny-addition", "--help"])
    assert stop.value.code == 0
    assert "--forecast.rule" in capsys.readouterr().out


def test_missing_model_and_task_fail_before_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["train", "tiny-addition", "--model.source", "/no/model", "--run-dir", str(tmp_path / "r")]) == 2
    assert "model.source='/no/model'" in capsys.readouterr().err
    arguments = ["train", "smollm2-arithmetic", "--task.name", "jsonl", "--task.path", "/no/data.jsonl"]
    tiny = ["--model.source", "tiny-digits", "--model.warm-start-steps", "1", "--model.cache-dir", str(tmp_path)]
    assert run([*arguments, *tiny]) == 1
    assert "TaskError: task.path='/no/data.jsonl': no such file" in capsys.readouterr().err
