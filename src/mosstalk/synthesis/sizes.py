"""Named sizes of synthetic checkpoints, and changes to them from the command line.

``sizes.json`` holds the published configs, and where the tiny sizes differ from them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mosstalk.config import FlowConfig, HiftConfig
from mosstalk.errors import ConfigError, OptionError
from mosstalk.files import parse_json, read_json

_FILE = read_json(Path(__file__).with_name("sizes.json"))
PUBLISHED_MODEL: dict[str, Any] = _FILE["model"]
PUBLISHED_CODEC: dict[str, Any] = _FILE["codec"]
PREPROCESSOR: dict[str, Any] = _FILE["preprocessor"]
_TINY: dict[str, dict[str, Any]] = _FILE["tiny"]


@dataclass(frozen=True)
class Sizes:
    """Configs of a checkpoint to write, in the published keys."""

    model: dict[str, Any]
    codec: dict[str, Any]
    flow: dict[str, Any]
    hift: dict[str, Any]
    preprocessor: dict[str, Any]


_FLOW, _HIFT = FlowConfig().to_dict(), HiftConfig().to_dict()
FULL = Sizes(PUBLISHED_MODEL, PUBLISHED_CODEC, _FLOW, _HIFT, PREPROCESSOR)
TINY = Sizes(
    PUBLISHED_MODEL | _TINY["model"],
    PUBLISHED_CODEC | _TINY["codec"],
    _FLOW | _TINY["flow"],
    _HIFT | _TINY["hift"],
    PREPROCESSOR,
)
NAMED = {"tiny": TINY, "full": FULL}


def named_sizes(word: str) -> Sizes:
    """The sizes that ``--random-weights`` names.

    Raises:
        OptionError: it names none.
    """
    if word not in NAMED:
        raise OptionError(f"--random-weights {word}: choose of {', '.join(NAMED)}")
    return NAMED[word]


def parse_sizes(words: list[str]) -> Sizes:
    """Sizes from words such as ``tiny``, ``hidden_size=256``, ``flow.input_size=128``.

    A name replaces everything said before it; ``codec.``, ``flow.`` and ``hift.`` lead to
    the codec's parts, keys without them to the language model's config.

    Raises:
        ConfigError: an unknown name, part or key, or a value that is no json.
    """
    sizes = TINY
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if word not in NAMED:
                raise ConfigError(f"unknown size {word!r}; say {', '.join(NAMED)} or KEY=VALUE")
            sizes = NAMED[word]
        else:
            sizes = _changed(sizes, key, value)
    layers = sizes.model["num_shared_layers"] + sizes.model["num_modality_layers"]
    return replace(sizes, model=sizes.model | {"num_hidden_layers": layers})


def _changed(sizes: Sizes, key: str, text: str) -> Sizes:
    part, dot, name = key.partition(".")
    if not dot:
        part, name = "model", key
    values = vars(sizes).get(part)
    if part == "preprocessor" or values is None or name not in values:
        raise ConfigError(
            f"unknown key {key!r} in --size; e.g. hidden_size=256, flow.input_size=96"
        )
    try:
        changed = values | {name: parse_json(text)}
    except ConfigError:
        raise ConfigError(f"--size {key}={text}: the value is not a number or json") from None
    wants_number = isinstance(values[name], int | float)
    if wants_number and not isinstance(changed[name], int | float):
        raise ConfigError(f"--size {key}={text}: the value is not a number")
    if name in ("quantize_position", "pooling_position"):
        changed |= dict.fromkeys(("quantize_position", "pooling_position"), changed[name])
    return replace(sizes, **{part: changed})
