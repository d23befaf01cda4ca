"""The command line: `farl train`, `farl list`. Imports what a command needs when it needs it.

Messages go to stderr, results to stdout; exit status 0, 1 for failure, 2 for wrong usage.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from farl.errors import ConfigError, FarlError

_USAGE = """usage: farl train RECIPE [--section.setting value ...] [--run-dir DIR]
       farl train --resume RUN_FOLDER
       farl list rules|correctors|recipes|tasks

RECIPE is the name of a shipped recipe or a TOML file; `farl train RECIPE --help` shows every setting.
"""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns the exit status."""
    commands = {"train": _train, "list": _list}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stderr)
        return 0 if arguments else 2
    if arguments[0] not in commands:
        print(f"farl {arguments[0]}: no such command\n{_USAGE}", file=sys.stderr)
        return 2
    try:
        return commands[arguments[0]](arguments[1:])
    except ConfigError as error:
        print(f"farl: {error}", file=sys.stderr)
        return 2
    except FarlError as error:
        print(f"farl: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"farl: {error}; install the extra: pip install 'farl-rl[train]'", file=sys.stderr)
        return 1


def _take_option(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """Takes `--name value` or `--name=value` out of the arguments."""
    rest, value, skip = [], None, False
    for i, argument in enumerate(arguments):
        if skip:
            skip = False
        elif argument == name:
            if i + 1 == len(arguments):
                raise ConfigError(f"{name}: needs a value")
            value, skip = arguments[i + 1], True
        elif argument.startswith(name + "="):
            value = argument.removeprefix(name + "=")
        else:
            rest.append(argument)
    return value, rest


def _train(arguments: list[str]) -> int:
    from farl.config import apply_overrides, load_recipe
    from farl.train import resume, start

    resume_folder, arguments = _take_option(arguments, "--resume")
    run_dir, arguments = _take_option(arguments, "--run-dir")
    stop = _stop_on_signals()
    if resume_folder is not None:
        if arguments:
            raise ConfigError(f"--resume continues a run as it was; it takes no other arguments, got {arguments}")
        resume(Path(resume_folder), stop=stop)
        return 0
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    config = apply_overrides(load_recipe(arguments[0]), arguments[1:])
    start(config, run_dir=Path(run_dir) if run_dir else None, stop=stop)
    return 0


def _stop_on_signals() -> threading.Event:
    """The first Ctrl-C or SIGTERM stops at the next batch boundary, after a checkpoint; the second at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("farl: stopping after this batch and saving; once more to stop at once", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def _list(arguments: list[str]) -> int:
    kinds = {"rules": _list_rules, "correctors": _list_correctors, "recipes": _list_recipes, "tasks": _list_tasks}
    if len(arguments) != 1 or arguments[0] not in kinds:
        print(f"farl list: one of {', '.join(kinds)}", file=sys.stderr)
        return 2
    for name, summary in kinds[arguments[0]]():
        print(f"{name:22} {summary}")
    return 0


def _list_rules() -> list[tuple[str, str]]:
    from farl.forecast import FORECASTERS

    return [(rule.name, rule.summary) for rule in FORECASTERS.values()]


def _list_correctors() -> list[tuple[str, str]]:
    from farl.correct import CORRECTORS, CorrectorConfig, make_corrector
    from farl.correct.catalogue import defaults_of, source_of

    rows = []
    for name, factory in CORRECTORS.items():
        corrector = make_corrector(CorrectorConfig(name=name))
        needs = ", ".join(sorted(n.name.lower() for n in corrector.needs)) or "nothing more"
        summary = (factory.__doc__ or "").strip().splitlines()[0]
        options = ", ".join(f"{k}={v}" for k, v in defaults_of(name).items() if v is not None)
        rows.append(
            (
                name,
                f"{summary}\n{'':23}needs     {needs}\n{'':23}defaults  {options}\n{'':23}source    {source_of(name)}",
            )
        )
    return rows


def _list_recipes() -> list[tuple[str, str]]:
    from farl.config import load_recipe, recipe_names

    return [(name, f"{(c := load_recipe(name)).model.source} on {c.task.name}") for name in recipe_names()]


def _list_tasks() -> list[tuple[str, str]]:
    from farl.tasks import TASKS

    return [(name, (factory.__doc__ or "").strip().splitlines()[0]) for name, factory in TASKS.items()]
