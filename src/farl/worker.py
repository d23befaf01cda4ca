"""Entry point of a rollout worker process: `python -m farl.worker --fd N`, started by the launcher."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from farl.build import build_tools
from farl.config import parse_config
from farl.runtime.messages import Channel
from farl.runtime.rollout import RolloutTools
from farl.runtime.worker import serve
from farl.wire import SharedMemoryReceiver


def _build(data: Mapping[str, Any]) -> RolloutTools:
    config = parse_config(data)
    torch.set_num_threads(config.pipeline.threads)
    return build_tools(config)


def main() -> None:
    """Serves until the learner says stop or goes away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the channel to the learner")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    serve(Channel(parser.parse_args().fd), _build, SharedMemoryReceiver())


if __name__ == "__main__":
    main()
