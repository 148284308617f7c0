"""A reply's mel hop by hop from kept state: a hop computes its own codes and no others.

What a voice's first codes leave behind is the same for every reply in that voice. It is
computed once and shared; a stream goes on from it and never writes into it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.codec.flow_encoder_stream import EncoderState, StreamingEncoder
from mosstalk.codec.flow_estimator_stream import EstimatorState, StreamingEstimator
from mosstalk.codec.flow_kept import seen_mask
from mosstalk.models.flow import FlowDecoder, FlowStream, fixed_noise
from mosstalk.models.voices import Voice

KEPT_VOICES = 4
"""Voices whose state a flow keeps, the latest used ones. Each takes the memory of a reply of
its length: at the published sizes, 4.6 MB for a frame of 20 ms in float32."""


@dataclass
class FlowState:
    """What a flow keeps of the ``codes`` it has decoded, those of the voice included."""

    codes: int
    encoder: EncoderState
    estimator: EstimatorState

    def fork(self) -> "FlowState":
        """The same state for another stream; neither then changes the other."""
        return FlowState(self.codes, self.encoder.fork(), self.estimator.fork())


@dataclass(frozen=True)
class VoiceStart:
    """Where replies in a voice begin, on the flow's device.

    ``mel`` (frames, 80) and ``speaker`` (80,) condition the flow. ``state`` holds the codes
    that depend on the voice alone; ``rest`` are the others, which see the reply.
    """

    mel: Tensor
    speaker: Tensor
    rest: list[int]
    state: FlowState


class StreamingFlow:
    """``FlowDecoder`` on new codes alone, and where replies in its latest voices begin."""

    @torch.inference_mode()
    def __init__(self, flow: FlowDecoder) -> None:
        # Not the flow itself: it is what this is kept under, weakly.
        self.config = flow.config
        self._embedding = flow.input_embedding
        self._speaker = flow.spk_embed_affine_layer
        self._encoder = StreamingEncoder(flow.encoder)
        self._proj = flow.encoder_proj
        times = flow.decoder.times(flow.encoder_proj.weight.device)
        self._estimator = StreamingEstimator(flow.decoder.estimator, times[:-1])
        self._durations: list[float] = times.diff().tolist()
        self._voices: OrderedDict[bytes, VoiceStart] = OrderedDict()
        self._lock = Lock()

    @torch.inference_mode()
    def voice(self, voice: Voice) -> VoiceStart:
        """Where replies in ``voice`` begin; computed when it is not one of the latest used."""
        key = voice.digest
        with self._lock:
            found = self._voices.pop(key, None) or self._start(voice)
            self._voices[key] = found
            if len(self._voices) > KEPT_VOICES:
                self._voices.popitem(last=False)
        return found

    def _start(self, voice: Voice) -> VoiceStart:
        weight, chunk = self._proj.weight, self.config.chunk_size
        speaker = self._speaker(F.normalize(voice.embedding.to(weight)[None], dim=1))[0]
        state = FlowState(0, self._encoder.start(), self._estimator.start())
        codes = voice.codes.tolist()
        alone = max(0, len(codes) - self.config.pre_lookahead_len) // chunk * chunk
        start = VoiceStart(voice.mel.to(weight), speaker, codes[alone:], state)
        if alone:
            ahead = codes[alone : alone + self.config.pre_lookahead_len]
            self.advance(start, state, codes[:alone], ahead)
        return start

    @torch.inference_mode()
    def advance(
        self, voice: VoiceStart, state: FlowState, codes: list[int], ahead: list[int] | None
    ) -> Tensor:
        """Mel (80, 4n) of n new codes; ``state`` moves on by them.

        ``ahead`` are the three codes that follow, None at the reply's end. Unless it is the
        end, the codes must complete a block.
        """
        ratio, bins = self.config.token_mel_ratio, self.config.mel_bins
        start, frames = state.codes * ratio, len(codes) * ratio
        mu = self._mean(state, codes, ahead)
        given = mu.new_zeros(2, frames, 3 * bins)
        given[0, :, :bins] = mu
        given[0, :, bins : 2 * bins] = voice.speaker
        prompt = voice.mel[start : start + frames]
        given[0, : prompt.shape[0], 2 * bins :] = prompt
        noise = fixed_noise(frames, bins, start=start).to(mu).transpose(1, 2)
        state.codes += len(codes)
        return self._integrate(noise, given, state.estimator)[0].T

    def _mean(self, state: FlowState, codes: list[int], ahead: list[int] | None) -> Tensor:
        ids = torch.tensor([*codes, *(ahead or [])], device=self._proj.weight.device)
        embedded = self._embedding(ids[None])
        new, following = embedded[:, : len(codes)], embedded[:, len(codes) :]
        context = None if ahead is None else following
        return self._proj(self._encoder(new, context, state.encoder, self.config.chunk_size))[0]

    def _integrate(self, x: Tensor, given: Tensor, state: EstimatorState) -> Tensor:
        """From noise (1, T, 80) to mel; ``given`` (2, T, 240) is mu, speaker and condition."""
        guidance, frames = self.config.cfg_rate, x.shape[1]
        block = self.config.chunk_size * self.config.token_mel_ratio
        mask = seen_mask(state.keys.rows, frames, block, x.device)
        keys = iter(state.keys.extend(frames))
        for step, duration in enumerate(self._durations):
            both = torch.cat([x.expand(2, -1, -1), given], dim=2)
            velocity, state.tails[step] = self._estimator.velocity(
                both, step, state.tails[step], keys, mask
            )
            guided = (1 + guidance) * velocity[:1] - guidance * velocity[1:]
            x = x + duration * guided
        return x


_Stamp = list[tuple[int, int]]
_flows: WeakKeyDictionary[FlowDecoder, tuple[_Stamp, StreamingFlow]] = WeakKeyDictionary()


def streaming(flow: FlowDecoder) -> StreamingFlow:
    """The streaming form of ``flow``, kept as long as the flow and its weights are as they are."""
    stamp = _stamp(flow)
    kept = _flows.get(flow)
    if kept is None or kept[0] != stamp:
        kept = _flows[flow] = (stamp, StreamingFlow(flow))
    return kept[1]


def _stamp(flow: FlowDecoder) -> _Stamp:
    """Where each weight lies and how often it was written: another after any training step."""
    return [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for weight in flow.parameters()
    ]


class CachedFlowStream(FlowStream):
    """Mel of one reply, each hop computed from what the hops before it left."""

    def __init__(self, flow: FlowDecoder, voice: Voice) -> None:
        super().__init__(flow, voice)
        self._flow = streaming(flow)
        self._voice = self._flow.voice(voice)
        self._state = self._voice.state.fork()

    def _hop(self, hop: int, *, final: bool) -> Tensor:
        end = self.done_codes + hop
        before = self._voice.rest if self.done_codes == 0 else []
        ahead = None if final else self.codes[end : end + self.config.pre_lookahead_len]
        codes = before + self.codes[self.done_codes : end]
        mel = self._flow.advance(self._voice, self._state, codes, ahead)
        return mel[:, len(before) * self.config.token_mel_ratio :]
