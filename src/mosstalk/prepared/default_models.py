"""Which model a command uses: folders, what ``mosstalk build`` left, or the pocket model.

A built folder holds ``model``, ``codec``, ``cache`` and ``engine.json``. Nothing here needs torch.
The pocket model ships inside the wheel, and not in the source archive: an installation made of
that says so where the model is wanted. The synthetic one is tiny and random, and is written to
the cache on first use: the whole path runs, and what is heard is noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.environment import cache_folder
from mosstalk.errors import CheckpointError, ConfigError, OutputError
from mosstalk.files import new_folder, read_json

ENGINE_FILE = "engine.json"
ENGINE_FORMAT = "mosstalk-engine-1"
MODEL, CODEC, CACHE = "model", "codec", "cache"
_SAID = (
    "weights", "precision", "built", "machine", "architecture", "dtypes", "engine", "settings",
    "plan", "checked_in", "checks", "kernels", "files",
)  # fmt: skip
"""What every ``engine.json`` says; those of later versions say more."""
_SETTINGS = ("max_sessions", "max_rows", "codec_memory_mib")
Folders = tuple[Path, Path]
"""A language model's folder and a codec's."""

NAMES = ("pocket", "synthetic")
"""What can be given in place of folders; a folder of that name comes first."""
_POCKET = Path(__file__).parents[1] / "pocket"
NO_WEIGHTS = (
    "this mosstalk was installed without weights, as its source archive (sdist) has none; install "
    "the wheel (mosstalk-VERSION-py3-none-any.whl), which brings the small model, or give your "
    "model's folders with --model and --codec"
)
_SYNTHETIC = "synthetic-tiny-4"
"""Changes whenever what is written under it would."""


def is_built(folder: Path) -> bool:
    """Whether ``mosstalk build`` made this folder."""
    return (folder / ENGINE_FILE).is_file()


@dataclass(frozen=True)
class BuiltEngine:
    """What ``mosstalk build`` left: a folder and what its ``engine.json`` says."""

    folder: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "BuiltEngine":
        """Read ``engine.json``.

        Raises:
            CheckpointError: there is none, it cannot be read, or another version wrote it.
        """
        path = folder / ENGINE_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder}: has no {ENGINE_FILE}; make one with: mosstalk build")
        try:
            values = read_json(path)
        except ConfigError:
            raise CheckpointError(f"{path}: damaged; build it again") from None
        found = values.get("format")
        if found != ENGINE_FORMAT:
            raise CheckpointError(
                f"{path}: the format is {found!r}, and this mosstalk reads "
                f"{ENGINE_FORMAT!r}; build it again"
            )
        settings = values.get("settings")
        known = settings if isinstance(settings, dict) else {}
        absent = [*(set(_SAID) - values.keys()), *(set(_SETTINGS) - known.keys())]
        if absent:
            raise CheckpointError(f"{path}: damaged: no {min(absent)}; build it again")
        return cls(folder, values)

    @property
    def model(self) -> Path:
        """The language model's folder."""
        return self.folder / MODEL

    @property
    def codec(self) -> Path:
        """The codec's folder."""
        return self.folder / CODEC

    @property
    def cache(self) -> Path:
        """Compiled kernels."""
        return self.folder / CACHE

    @property
    def sessions(self) -> int:
        """Sessions at once that it was built for."""
        return int(self.values["settings"]["max_sessions"])

    @property
    def rows(self) -> int:
        """Rows of the longest conversation that it was built for."""
        return int(self.values["settings"]["max_rows"])

    @property
    def embeddings(self) -> str:
        """Where the table of text embeddings shall be: ``device`` or ``host``."""
        return str(self.values["settings"].get("embeddings", "device"))

    @property
    def flow_memory_mib(self) -> int | None:
        """Memory of a GPU for voices and replies; None where it was built on a CPU."""
        found = self.values["settings"]["codec_memory_mib"]
        return None if found is None else int(found)


def built_engine(folder: Path | None) -> BuiltEngine | None:
    """The built engine that a folder is; None for any other.

    Raises:
        CheckpointError: see ``BuiltEngine.read``.
    """
    return BuiltEngine.read(folder) if folder and is_built(folder) else None


def default_model() -> Folders:
    """Folders of the default model and codec: the pocket model's.

    Raises:
        CheckpointError: this installation has no weights; the message says where they are.
    """
    shipped = shipped_model()
    if shipped is None:
        raise CheckpointError(NO_WEIGHTS)
    return shipped


def shipped_model() -> Folders | None:
    """Folders of the pocket model inside the package; None where its weights are not there."""
    if not (_POCKET / "model" / "config.json").is_file():
        return None
    return _POCKET / "model", _POCKET / "codec"


def synthetic_model() -> Folders:
    """Folders of the tiny synthetic model, written to the cache on first use.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    folder = _synthetic_folder()
    if not folder.exists():
        # Here, because looking for the shipped model needs no torch.
        from mosstalk.synthesis.sizes import TINY
        from mosstalk.synthesis.weights import Synthesis, synthesize

        try:
            with new_folder(folder) as part:
                synthesize(part, Synthesis(TINY))
        except OutputError:
            # Another process may have written the same one meanwhile.
            if not folder.exists():
                raise
    return folder / "model", folder / "codec"


def name_of(model: Path) -> str:
    """A checkpoint's own name: that of the folder around where its model lies in ``model``."""
    folder = model.resolve()
    return folder.parent.name if model.name == "model" else folder.name


def is_shipped(codec: Path) -> bool:
    """Whether this codec's folder lies inside the package, which commands leave as it is."""
    return codec == _POCKET / "codec"


def is_synthetic(codec: Path) -> bool:
    """Whether this is the codec's folder that ``synthetic_model`` writes."""
    return codec == _synthetic_folder() / "codec"


def _synthetic_folder() -> Path:
    return cache_folder() / _SYNTHETIC


def require_pair(model: Path | None, codec: Path | None) -> None:
    """Raise ConfigError unless both are folders, or neither, or one has both: a name, a build."""
    if (model is None) is (codec is None) or (model and not _is_plain(model)):
        return
    given = (folder for folder in (model, codec) if folder and not _is_name(folder))
    gone = [f"{folder}: no such folder; " for folder in given if not folder.exists()]
    raise ConfigError(
        f"{''.join(gone)}--model and --codec belong together: give both folders, or neither, or "
        f"{', '.join(f'--model {name}' for name in NAMES)} or a folder that mosstalk build made "
        "alone"
    )


def chosen_model(model: Path | None, codec: Path | None) -> Folders:
    """Folders that ``--model`` and ``--codec`` stand for.

    Both, neither, or alone one of ``NAMES`` or a folder that ``mosstalk build`` made.

    Raises:
        ConfigError: one folder was given without the other.
        CheckpointError: the pocket model is wanted and not there, or a built folder is of
            another version.
        OutputError: the cache folder cannot be written.
    """
    require_pair(model, codec)
    if model is None:
        return default_model()
    if codec:
        return model, codec
    built = built_engine(model)
    return (built.model, built.codec) if built else _named(model)


def chosen_codec(codec: Path | None) -> Path:
    """The folder that ``--codec`` alone stands for: as given, by name, or the default's.

    Raises:
        CheckpointError: the pocket model is wanted and not there.
    """
    return codec if codec and _is_plain(codec) else chosen_model(codec, None)[1]


def chosen_language_model(model: Path | None) -> Path:
    """The folder that ``--model`` alone stands for; as ``chosen_codec``."""
    return model if model and _is_plain(model) else chosen_model(model, None)[0]


def _is_plain(folder: Path) -> bool:
    """Whether this is one checkpoint's own folder: no name, no build."""
    return not _is_name(folder) and not is_built(folder)


def _is_name(path: Path) -> bool:
    return str(path) in NAMES and not path.exists()


def _named(path: Path) -> Folders:
    return synthetic_model() if str(path) == "synthetic" else default_model()
