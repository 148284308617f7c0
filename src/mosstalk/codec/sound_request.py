"""How sound is made of codes, as users ask for it. Plain values, without torch."""

from dataclasses import dataclass
from pathlib import Path

from mosstalk.errors import OptionError

VOCODERS = ("hift", "bigvgan")
CONTEXT_S = 2.0
"""What a reply remembers of itself unless something else is asked for. At the published sizes that
is 227 MiB in 16 bit; with the pocket model replies of 11 s lost nothing that judges could hear
(docs/codec.md). Everything is kept where 0 is asked for."""


@dataclass(frozen=True)
class SoundRequest:
    """Choices of flow and vocoder; None leaves one to the device or the codec.

    ``context_s``: seconds of its own sound that a reply remembers besides its voice, 0 for all
    of it, None for ``CONTEXT_S``. ``steps``:
    Euler steps of the flow. ``dtype``: float32, float16 or bfloat16. ``memory_mib``: of a GPU,
    for voices and replies. ``graphs``: replay CUDA graphs. ``vocoder``: one of ``VOCODERS``;
    ``vocoder_folder`` holds BigVGAN's ``config.json`` and ``bigvgan_generator.pt``.

    Raises:
        OptionError: a vocoder that is unknown, or a folder too many or missing.
    """

    context_s: float | None = None
    steps: int | None = None
    dtype: str | None = None
    memory_mib: int | None = None
    graphs: bool = True
    vocoder: str = "hift"
    vocoder_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.vocoder not in VOCODERS:
            raise OptionError(f"--vocoder {self.vocoder}: choose of {', '.join(VOCODERS)}")
        if self.vocoder == "bigvgan" and self.vocoder_folder is None:
            raise OptionError(
                "--vocoder bigvgan needs --vocoder-dir: a folder with NVIDIA's config.json and "
                "bigvgan_generator.pt"
            )
        if self.vocoder == "hift" and self.vocoder_folder is not None:
            raise OptionError("--vocoder-dir belongs to --vocoder bigvgan")

    @property
    def plain(self) -> bool:
        """Whether nothing was asked for."""
        return self == SoundRequest()
