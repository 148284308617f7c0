"""What a checkpoint asks for: ``generation_config.json`` beside its ``config.json``.

The file is the one that model repositories commonly carry. Of its keys ``temperature``,
``top_k``, ``top_p``, ``repetition_penalty``, ``do_sample`` and ``max_new_tokens`` are read;
``do_sample`` false is greedy, absent it leaves the temperature as it is. Others are left alone.
An object ``mosstalk`` in it may say otherwise for a task::

    {"temperature": 0.6, "mosstalk": {"transcribe": {"do_sample": false}}}

For ``chat`` it may also say that the model writes a spoken reply before it speaks it, in the same
reply, so that speech is not opened for it::

    {"mosstalk": {"chat": {"writes_first": true}}}

For ``speak`` it may also hold what ``TextRules`` says of the text that is read aloud::

    {"mosstalk": {"speak": {"max_chars": 90, "languages": ["en"], "normalize": true}}}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mosstalk.config import Reader
from mosstalk.errors import ConfigError, OptionError
from mosstalk.files import read_json
from mosstalk.offline.pieces import LONGEST_TEXT
from mosstalk.offline.text_normalizer import LANGUAGES, TextRules
from mosstalk.reply_options import Limits, SamplingOptions

FILE = "generation_config.json"
TASKS = ("chat", "speak", "transcribe")
_KINDS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
    "do_sample": bool,
    "max_new_tokens": int,
}


@dataclass(frozen=True)
class Choices:
    """Values that someone chose for a reply; None leaves one to whoever is asked next."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_rows: int | None = None

    def __post_init__(self) -> None:
        """Raise OptionError for values no distribution or reply follows from."""
        self.options()
        self.limits()

    def over(self, others: "Choices") -> "Choices":
        """These values, and those of ``others`` where none was chosen here."""
        return Choices(**(vars(others) | self._chosen()))

    def options(self, seed: int = 0) -> SamplingOptions:
        """How ids are drawn; what no one chose is the public demo's."""
        chosen = self._chosen()
        chosen.pop("max_new_rows", None)
        return SamplingOptions(**chosen, seed=seed)

    def limits(self) -> Limits:
        """How long a reply may be."""
        return Limits() if self.max_new_rows is None else Limits(self.max_new_rows)

    def _chosen(self) -> dict[str, Any]:
        values = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True)
class Defaults:
    """What a checkpoint chose, by the name of a task.

    ``text``: what it asks of text that it reads aloud. ``writes_first``: in a chat it writes a
    spoken reply before it speaks it.
    """

    tasks: Mapping[str, Choices] = field(default_factory=dict)
    text: TextRules = field(default_factory=TextRules)
    writes_first: bool = False

    def of(self, task: str) -> Choices:
        """The choices for one of ``TASKS``."""
        assert task in TASKS, task
        return self.tasks.get(task, Choices())


def read_defaults(folder: Path) -> Defaults:
    """Read ``folder/generation_config.json``; without the file nothing is chosen.

    Raises:
        ConfigError: the file is no json object, a value has the wrong type or means nothing,
            or its ``mosstalk`` object names an unknown task, key or language.
    """
    path = folder / FILE
    if not path.exists():
        return Defaults()
    reader = Reader(read_json(path), str(path))
    common = _values(reader)
    own = Reader(reader.get("mosstalk", dict, {}), f"{path}: mosstalk")
    readers = {task: Reader(own.get(task, dict, {}), f"{own.where}.{task}") for task in TASKS}
    _refuse_unknown(own, TASKS)
    text, tasks = _text_rules(readers["speak"]), {}
    writes_first: bool = readers["chat"].get("writes_first", bool, False)
    for task, each in readers.items():
        tasks[task] = _choices(common | _values(each), each.where)
        _refuse_unknown(each, (*_KINDS, *sorted(each.used - set(_KINDS))))
    return Defaults(tasks, text, writes_first)


def _text_rules(reader: Reader) -> TextRules:
    languages = tuple(reader.get("languages", list, []))
    for language in languages:
        if not isinstance(language, str) or language not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            raise ConfigError(f"{reader.where}: unknown language {language!r}; known: {known}")
    normalize: bool = reader.get("normalize", bool, False)
    if normalize and not languages:
        raise ConfigError(f'{reader.where}: normalize needs languages, such as ["en"]')
    return TextRules(reader.size("max_chars", LONGEST_TEXT), languages, normalize)


def _values(reader: Reader) -> dict[str, Any]:
    found = {key: reader.get(key, kind, None) for key, kind in _KINDS.items()}
    return {key: value for key, value in found.items() if value is not None}


def _refuse_unknown(reader: Reader, known: tuple[str, ...]) -> None:
    for key in reader.rest():
        raise ConfigError(f"{reader.where}: unknown key {key!r}; known: {', '.join(known)}")


def _choices(values: dict[str, Any], where: str) -> Choices:
    greedy = {"temperature": 0.0} if values.get("do_sample") is False else {}
    named = values | greedy | {"max_new_rows": values.get("max_new_tokens")}
    try:
        return Choices(**{spec.name: named.get(spec.name) for spec in fields(Choices)})
    except OptionError as error:
        raise ConfigError(f"{where}: {error}") from None
