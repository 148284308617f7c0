"""The model that a command uses: its folders, what is said of its weights, loading it."""

from dataclasses import dataclass, field
from pathlib import Path

from mosstalk.codec.sound_request import SoundRequest
from mosstalk.config import LanguageModelConfig
from mosstalk.offline.defaults import Choices
from mosstalk.offline.pipeline import Pipeline
from mosstalk.prepared.default_models import Folders, chosen_model
from mosstalk.prepared.start import take_kernels
from mosstalk.progress import loading
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype
from mosstalk.sampling_options import Limits, SamplingOptions
from mosstalk.script import Script

_REAL = (
    "The real MOSS-Speech needs its checkpoint (17 GiB), its codec and a GPU that holds both; "
    "name their folders with --model and --codec."
)
NOTICES = {
    ("synthetic", "speech"): "The weights of this model are random: what you will hear is noise, "
    f"not speech. {_REAL}",
    ("synthetic", "text"): "The weights of this model are random: what it writes is noise, not "
    f"words. {_REAL}",
    ("pocket", "speech"): "The weights are mosstalk-pocket's, a small model that ships with "
    f"mosstalk: expect plain speech and mistakes. {_REAL}",
    ("pocket", "text"): "The weights are mosstalk-pocket's, a small model that ships with "
    f"mosstalk: expect plain words and mistakes. {_REAL}",
}
"""What is said before anything else, by the kind of weights and of reply."""
DEFAULT_SCRIPTS = {"speech": "speech:75", "text": "text:40"}
"""Scripts for random weights, by the kind of reply: they would never end one by themselves."""


@dataclass(frozen=True)
class ModelRequest:
    """Which model was asked for, and where and in which precision it shall run."""

    model: Path | None
    codec: Path | None
    device: str
    dtype: str | None
    sound: SoundRequest = field(default_factory=SoundRequest)


@dataclass(frozen=True)
class SamplingRequest:
    """How replies shall be drawn; what was not chosen is left to the checkpoint."""

    choices: Choices
    seed: int
    script: Script | None

    @classmethod
    def of(cls, choices: Choices, seed: int, script: str | None) -> "SamplingRequest":
        """Parse the script; raise ScriptError with the syntax."""
        return cls(choices, seed, Script.parse(script) if script is not None else None)


@dataclass(frozen=True)
class Drawing:
    """How the replies of one command are drawn, with everything decided."""

    options: SamplingOptions
    limits: Limits
    script: Script | None

    @classmethod
    def of(cls, request: SamplingRequest, pipeline: Pipeline, task: str, reply: str) -> "Drawing":
        """Take what was asked for, then what the checkpoint chose for this task.

        Random weights never end a reply: without a script they get one.
        """
        choices = request.choices.over(pipeline.defaults.of(task))
        script = request.script
        if script is None and pipeline.model.config.weights_kind == "synthetic":
            script = Script.parse(DEFAULT_SCRIPTS[reply])
        return cls(choices.options(request.seed), choices.limits(), script)

    def facts(self) -> dict[str, object]:
        """How ids were drawn, for documents."""
        drawn = {name: value for name, value in vars(self.options).items() if name != "seed"}
        script = str(self.script) if self.script else None
        return {"seed": self.options.seed, "sampling": drawn, "script": script}


@dataclass(frozen=True)
class ChosenModel:
    """A model whose config was read and whose weights were not."""

    request: ModelRequest
    folders: Folders
    config: LanguageModelConfig

    @classmethod
    def of(cls, request: ModelRequest) -> "ChosenModel":
        """Find the folders and read the config."""
        folders = chosen_model(request.model, request.codec)
        return cls(request, folders, LanguageModelConfig.from_folder(folders[0]))

    def announce(self, reply: str) -> None:
        """Say what these weights are, where that is not what a user would expect."""
        notice = NOTICES.get((self.config.weights_kind, reply))
        if notice:
            print(notice)

    def load(self) -> Pipeline:
        """Read the weights, in float32 on a CPU and as stored on a GPU unless asked otherwise."""
        device = pick_device(self.request.device)
        built = take_kernels(self.request.model, device)
        dtype = pick_dtype(self.request.dtype) if self.request.dtype else None
        if dtype is None and device.type == "cpu":
            dtype = pick_dtype("float32")
        with loading() as (_, tell):
            pipeline = Pipeline.load(
                *self.folders, device=device, dtype=dtype, progress=tell,
                sound=self.request.sound, embeddings=built.embeddings if built else "device",
            )  # fmt: skip
        codec = pipeline.codec
        fit_threads(device, (pipeline.model, codec.tokenizer, codec.flow, codec.vocoder))
        return pipeline
