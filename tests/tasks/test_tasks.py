import json
import sys

import pytest

from farl.core.protocols import Task
from farl.errors import ConfigError, TaskError
from farl.tasks import TASKS, TaskConfig, make_task
from farl.tasks.addition import is_held_out, warm_start_examples


class Letters:
    """One id a character."""

    def encode_prompt(self, question, *, system=None):
        return tuple(map(ord, (system or "") + question))

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture
def config(request, tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"{a} times 2?", "answer": str(2 * a)} for a in range(30)]
    path.write_text("\n".join(json.dumps(r) for r in [*rows, rows[0]]) + "\n\n")
    made = {
        "addition": TaskConfig(name="addition", num_eval=20),
        "jsonl": TaskConfig(name="jsonl", path=str(path), num_eval=10, scorer="number"),
        "reasoning_gym": TaskConfig(
            name="reasoning_gym",
            num_eval=12,
            options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        ),
    }
    return made[request.param]


@pytest.mark.parametrize("config", sorted(TASKS), indirect=True)
def test_conformance(config):
    task, again = make_task(config, Letters()), make_task(config, Letters())
    assert isinstance(task, Task)
    held_out = task.eval_problems()
    assert len(held_out) == config.num_eval == len({p.key for p in held_out})
    training = [task.train_problem(i) for i in range(60)]
    assert not {p.key for p in training} & {p.key for p in held_out}, "held out means held out"
    assert training == [again.train_problem(i) for i in range(60)]
    assert task.train_problem(7) == training[7], "a pure function of the index"
    assert list(held_out) == list(again.eval_problems())
    assert len({p.key for p in training}) > 15
    for problem in [*training[:10], *held_out[:5]]:
        assert problem.prompt_ids == Letters().encode_prompt(problem.text)
        assert task.score(problem, f" {problem.entry['answer']}\n") == 1.0
        assert task.score(problem, "no idea") < 0.1
        assert task.score(problem, "") < 0.1


def test_every_task_is_covered():
    assert set(TASKS) == {"addition", "jsonl", "reasoning_gym"}


def test_seeds_give_other_problems():
    streams = [
        [make_task(TaskConfig(name="addition", seed=s), Letters()).train_problem(i).key for i in range(5)]
        for s in (0, 1)
    ]
    assert streams[0] != streams[1]


def test_template_and_system_prompt():
    config = TaskConfig(name="addition", template="Q {question} A")
    problem = make_task(config, Letters(), system="S:").train_problem(0)
    assert Letters().decode(problem.prompt_ids) == f"S:Q {problem.text} A"


def test_warm_start_examples_are_not_held_out_and_noise_is_what_was_asked_for():
    examples = warm_start_examples(0.5)
    wrong = 0
    for _ in range(2000):
        question, answer = next(examples)
        a, b = map(int, question.rstrip("=").split("+"))
        assert not is_held_out(a, b)
        assert len(answer) == 3
        wrong += int(answer) != a + b
    assert 0.40 < wrong / 2000 < 0.50  # a tenth of the redrawn digits fall on the right one


@pytest.mark.parametrize(
    ("scorer", "answer", "good", "bad"),
    [
        ("exact", "4", " 4\n", "The answer is 4"),
        ("number", "1,234", "so it is 1234.0", "1235"),
        ("number", "-3", "we get -3.", "3"),
        ("math", r"$\frac{1}{2}$", "$0.5$", "$0.4$"),
    ],
)
def test_scorers(tmp_path, scorer, answer, good, bad):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"q": str(i), "a": answer}) for i in range(3)))
    config = TaskConfig(name="jsonl", path=str(path), num_eval=1, question_field="q", answer_field="a", scorer=scorer)
    task = make_task(config, Letters())
    assert task.score(task.train_problem(0), good) == 1.0
    assert task.score(task.train_problem(0), bad) == 0.0


def test_partial_credit_of_additions():
    task = make_task(TaskConfig(name="addition", options={"partial_credit": True}), Letters())
    problem = task.train_problem(0)
    answer = problem.entry["answer"]
    assert task.score(problem, answer) == 1.0
    assert task.score(problem, answer[:2] + ("1" if answer[2] != "1" else "2")) == pytest.approx(2 / 3)
    assert task.score(problem, answer[:2]) == 0.0


def test_a_task_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_farl_task.py").write_text(
        "from farl.tasks.addition import AdditionTask\nfrom farl.tasks.prompts import Prompts\n"
        "def make(config, tokenizer):\n    return AdditionTask(config, Prompts(tokenizer, '{question}', None))\n"
        "def broken(config, tokenizer):\n    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = make_task(TaskConfig(import_from="my_farl_task:make"), Letters())
    assert task.train_problem(0).text.endswith("=")
    with pytest.raises(TaskError, match="gave a int, which lacks train_problem"):
        make_task(TaskConfig(import_from="my_farl_task:broken"), Letters())
    with pytest.raises(ConfigError, match="task.import='my_farl_task:none': cannot be imported"):
        make_task(TaskConfig(import_from="my_farl_task:none"), Letters())
    sys.modules.pop("my_farl_task")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"name": "adition"}, ConfigError, "Did you mean 'addition'"),
        ({"num_eval": 0}, ConfigError, "task.num_eval=0"),
        ({"template": "no place"}, ConfigError, "must contain {question}"),
        ({"import_from": "nocolon"}, ConfigError, "must read 'package.module:factory'"),
        ({"scorer": "vibes"}, ConfigError, "must be 'exact', 'number' or 'math'"),
        ({"name": "jsonl"}, TaskError, "task.path='': no such file"),
        ({"name": "jsonl", "path": "/no/such.jsonl"}, TaskError, "task.path='/no/such.jsonl': no such file"),
        ({"name": "addition", "num_eval": 5000}, ConfigError, "at most"),
        ({"name": "addition", "options": {"partial": True}}, ConfigError, "addition knows partial_credit only"),
        ({"dataset": "no_such_dataset"}, ConfigError, "task.dataset='no_such_dataset'.*reasoning-gym refuses"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, ConfigError, "reasoning-gym refuses"),
    ],
)
def test_what_cannot_work_is_named(settings, error, words):
    with pytest.raises(error, match=words):
        make_task(TaskConfig(**settings), Letters())


def test_lines_that_are_no_problems_are_named_with_their_number(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n{"question": "c"}\n')
    with pytest.raises(TaskError, match=r"d.jsonl:2: not an object with 'question' and 'answer'"):
        make_task(TaskConfig(name="jsonl", path=str(path)), Letters())
    path.write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(ConfigError, match="holds 1 different questions; some must be left"):
        make_task(TaskConfig(name="jsonl", path=str(path)), Letters())
