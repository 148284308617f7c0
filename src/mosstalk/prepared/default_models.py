"""The models that are there without a download, and which one a command uses.

The pocket model ships inside the package, as far as this one holds its weights. The synthetic
one is tiny and random, and is written to the cache on first use: the whole path runs, and
what is heard is noise.
"""

from pathlib import Path

from mosstalk.environment import cache_folder
from mosstalk.errors import CheckpointError, ConfigError
from mosstalk.files import new_folder
from mosstalk.prepared.folder import built_engine, is_built

Folders = tuple[Path, Path]
"""A language model's folder and a codec's."""

NAMES = ("pocket", "synthetic")
"""What can be given in place of folders; a folder of that name comes first."""
_POCKET = Path(__file__).parents[1] / "pocket"
_SYNTHETIC = "synthetic-tiny-4"
"""Changes whenever what is written under it would."""


def default_model() -> Folders:
    """Folders of the default model and codec: the pocket one, else the synthetic one.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    return shipped_model() or synthetic_model()


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
        from mosstalk.synthesis.write import Synthesis, synthesize

        with new_folder(folder) as part:
            synthesize(part, Synthesis(TINY))
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
        CheckpointError: the pocket model was asked for and is not there, or a built folder is
            of another version.
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
        CheckpointError: the pocket model was asked for and is not there.
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
    if str(path) == "synthetic":
        return synthetic_model()
    shipped = shipped_model()
    if shipped is None:
        raise CheckpointError(
            "this installation holds no pocket model; give folders with --model and --codec"
        )
    return shipped
