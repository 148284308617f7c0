"""Stand-ins for the public code: its interface, computing with the tiny synthetic checkpoint.

That they behave as the real thing is not shown here.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mosstalk import read_audio
from mosstalk.conversation import Conversation, SpecialIds
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.codec_folder import Codec, load_codec
from mosstalk.models.features import whisper_log_mel
from mosstalk.models.flow import FlowDecoder, fixed_noise
from mosstalk.models.generation import Generation
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.models.voices import Voice, any_voice, list_voices
from mosstalk.numerics.rng import normal
from mosstalk.reply_options import Limits, SamplingOptions

CPU = torch.device("cpu")


class StandInModel(LanguageModel):
    """``generate`` as the public model has it: criteria see the whole grid (1, L, 2)."""

    def generate(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        generation_config: SimpleNamespace,
        stopping_criteria: Callable[..., Tensor],
    ) -> Tensor:
        assert attention_mask.shape == input_ids.shape[:2]
        assert generation_config.do_sample is False
        config = self.config
        pad, sosp, eosp = (
            config.modality_pad_token_id,
            config.sosp_token_id,
            config.eosp_token_id,
        )
        ids = SpecialIds(-1, -1, -1, sosp, pad, eosp, config.audio_pad_token_id, frozenset())
        generation = Generation(
            self,
            self.new_cache(),
            [(text, audio) for text, audio in input_ids[0].tolist()],
            ids,
            SamplingOptions(0, repetition_penalty=generation_config.repetition_penalty),
            Limits(generation_config.max_new_tokens, generation_config.min_new_tokens),
        )
        grid = input_ids
        for step in generation:
            grid = torch.cat([grid, torch.tensor([[step.row]])], dim=1)
            if bool(stopping_criteria(grid, None).all()):
                break
        return grid


class WhisperVQEncoder(nn.Module):
    """Named as the public class; codes of log-mel features."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.speech = codec.tokenizer

    def forward(self, input_features: Tensor, pcm: Tensor) -> list[int]:
        assert input_features.shape[:2] == (1, self.speech.config.num_mel_bins)
        return self.speech.encode(pcm)


class CausalMaskedDiffWithXvec(nn.Module):
    """Named as the public class, with the argument names of its ``inference``."""

    def __init__(self, flow: FlowDecoder) -> None:
        super().__init__()
        self.flow = flow
        self.encoder_proj = flow.encoder_proj
        self.decoder = nn.Module()
        self.decoder.rand_noise = fixed_noise(100)

    def inference(
        self,
        token: Tensor,
        token_len: Tensor,
        prompt_token: Tensor,
        prompt_feat: Tensor,
        embedding: Tensor,
        finalize: bool,
    ) -> tuple[Tensor, None]:
        assert int(token_len) == token.shape[1]
        voice = Voice(prompt_token[0], prompt_feat[0], embedding[0])
        return self.flow.decode(voice, token[0], final=finalize, masked=False)[None], None


class HiFTGenerator(nn.Module):
    """Named as the public class: a mel in, wave and source out."""

    def __init__(self, vocoder: HiftVocoder) -> None:
        super().__init__()
        self.vocoder = vocoder

    def inference(self, speech_feat: Tensor) -> tuple[Tensor, Tensor]:
        mel = speech_feat[0]
        f0 = self.vocoder.f0(mel)
        phases = self.vocoder.phase_steps(f0).cumsum(0)
        noise = normal(0, 1, torch.arange(480 * mel.shape[1]), self.vocoder.harmonics)
        source = self.vocoder.source(f0, phases, noise)
        return self.vocoder.synthesise(mel, source)[None], source[None, None]


class StandInProcessor:
    """Conversations to grids, and grids to sound, through parts in odd places."""

    def __init__(self, model: Path, codec: Path) -> None:
        self.ids, self.text = ids_of(model)
        special = self.text.special
        self.tokenizer = SimpleNamespace(
            pad_token_id=special["<|endoftext|>"], convert_tokens_to_ids=special.__getitem__
        )
        loaded = load_codec(codec, device=CPU, flow_name="flow")
        self.voice = loaded.voice(any_voice(list_voices(codec / "voices")))
        self.codec = SimpleNamespace(encoder=WhisperVQEncoder(loaded))
        self.parts = {"audio": [CausalMaskedDiffWithXvec(loaded.flow)]}
        self.vocoders = (HiFTGenerator(loaded.vocoder),)

    def __call__(
        self, conversations: list[list[dict[str, Any]]], kinds: list[str]
    ) -> dict[str, Tensor]:
        conversation = Conversation(self.ids, self.text.encode)
        for turn in conversations[0]:
            if isinstance(turn["content"], str):
                conversation.add_text(turn["role"], turn["content"])
            else:
                conversation.add_speech(turn["role"], self._codes(turn["content"]["path"]))
        conversation.open_reply(kinds[0] == "audio")
        grid = torch.tensor([conversation.rows])
        return {"input_ids": grid, "attention_mask": torch.ones(grid.shape[:2])}

    def _codes(self, path: Path) -> list[int]:
        pcm = torch.from_numpy(read_audio(Path(path), 16_000).samples)
        padded = nn.functional.pad(pcm, (0, -len(pcm) % 1280))
        return cast(list[int], self.codec.encoder(whisper_log_mel(padded)[None], pcm=pcm))

    def decode(
        self, token_ids: Tensor, kinds: list[str], *, decoder_audio_prompt_path: str
    ) -> list[SimpleNamespace]:
        assert kinds == ["audio"]
        assert Path(decoder_audio_prompt_path).is_file()
        grid = token_ids[0]
        reply = grid[int((grid[:, 0] == self.ids.im_start).nonzero()[-1]) :]
        codes = reply[(reply[:, 0] == self.ids.modality_pad) & (reply[:, 1] < self.ids.eosp), 1]
        mel, _ = self.parts["audio"][0].inference(
            token=codes[None],
            token_len=torch.tensor([len(codes)]),
            prompt_token=self.voice.codes[None],
            prompt_feat=self.voice.mel[None],
            embedding=self.voice.embedding[None],
            finalize=True,
        )
        wave, _ = self.vocoders[0].inference(speech_feat=mel)
        return [SimpleNamespace(audio=wave, sampling_rate=24_000, generated_text="")]


def ids_of(model: Path) -> tuple[SpecialIds, TextTokenizer]:
    network = load_language_model(model, device=CPU)
    text = TextTokenizer.from_folder(model, network.config.vocab_size)
    return SpecialIds.of(network.config, text.special), text


def stand_in_model(path: str, *, trust_remote_code: bool, device_map: str) -> LanguageModel:
    assert trust_remote_code
    if not Path(path).is_dir():
        raise OSError(f"{path} is not a local folder and is not a valid model identifier")
    model = load_language_model(Path(path), device=torch.device(device_map), dtype=torch.float32)
    model.__class__ = StandInModel
    return model


def stand_in_processor(
    path: str, *, codec_path: str, device: str, trust_remote_code: bool
) -> StandInProcessor:
    assert trust_remote_code
    assert device == "cpu"
    return StandInProcessor(Path(path), Path(codec_path))


class StoppingCriteria:
    """As in transformers: called with the ids so far, says of each sequence whether it ends."""

    def __call__(self, input_ids: Tensor, scores: None) -> Tensor:
        raise NotImplementedError


class StoppingCriteriaList(list[StoppingCriteria]):
    """As in transformers: done where any criterion says so."""

    def __call__(self, input_ids: Tensor, scores: None) -> Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        for criterion in self:
            done = done | criterion(input_ids, scores)
        return done


LIBRARY = SimpleNamespace(
    AutoProcessor=SimpleNamespace(from_pretrained=stand_in_processor),
    AutoModel=SimpleNamespace(from_pretrained=stand_in_model),
    GenerationConfig=SimpleNamespace,
    StoppingCriteria=StoppingCriteria,
    StoppingCriteriaList=StoppingCriteriaList,
)
