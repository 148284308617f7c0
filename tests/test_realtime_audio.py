"""Sound on the wire: G.711 as libsndfile has it, other rates as soxr has them in one piece."""

import base64
import io

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given
from hypothesis import strategies as st
from realtime_rig import tone

from mosstalk.server.realtime.validation import (
    A_LAW,
    MU_LAW,
    AudioFormat,
    Encoder,
    decode_g711,
    encode_g711,
)

EVERY_SAMPLE = np.arange(-32768, 32768).astype("<i2")
EVERY_BYTE = bytes(range(256))
LAWS = {"ULAW": MU_LAW, "ALAW": A_LAW}


@pytest.mark.parametrize("law", LAWS)
def test_bytes_become_the_samples_that_libsndfile_makes_of_them(law: str) -> None:
    raw, _ = soundfile.read(
        io.BytesIO(EVERY_BYTE), dtype="int16", samplerate=8000, channels=1, format="RAW",
        subtype=law,
    )  # fmt: skip
    assert (np.frombuffer(decode_g711(EVERY_BYTE, LAWS[law]), "<i2") == raw).all()


def test_samples_become_the_bytes_that_libsndfile_makes_of_them() -> None:
    for law, kind in LAWS.items():
        file = io.BytesIO()
        soundfile.write(file, EVERY_SAMPLE, 8000, format="RAW", subtype=law)
        theirs = np.frombuffer(file.getvalue(), np.uint8)
        ours = np.frombuffer(encode_g711(EVERY_SAMPLE.tobytes(), kind), np.uint8)
        # libsndfile divides negative samples towards zero, which the standard does not: at the
        # edge between two A-law bytes it takes the other one.
        wrong = EVERY_SAMPLE[theirs != ours]
        assert len(wrong) == 0 if law == "ULAW" else set(wrong % 16) == {0} and (wrong < 0).all()


@pytest.mark.parametrize("law", LAWS)
def test_what_was_decoded_is_encoded_to_the_same_sound(law: str) -> None:
    heard = decode_g711(EVERY_BYTE, LAWS[law])
    assert decode_g711(encode_g711(heard, LAWS[law]), LAWS[law]) == heard


@pytest.mark.parametrize(
    "wanted", [AudioFormat(type="audio/pcm", rate=8000), AudioFormat(type="audio/pcm", rate=16_000)]
)
@given(cuts=st.lists(st.integers(1, 3000), max_size=12))
def test_a_reply_sent_in_pieces_is_resampled_as_in_one(
    wanted: AudioFormat, cuts: list[int]
) -> None:
    pcm = (tone(0.5) * 20_000).astype("<i2")
    encoder, pieces = Encoder(wanted), np.split(pcm, np.cumsum(cuts).clip(0, len(pcm)))
    sent = [encoder.push(piece.tobytes()) for piece in pieces] + [encoder.push(b"", last=True)]
    whole = soxr.resample(pcm.astype(np.float32), 24_000, wanted.sample_rate, quality="HQ")
    heard = np.frombuffer(b"".join(map(base64.b64decode, sent)), "<i2")
    assert np.abs(heard - np.rint(whole)).max() <= 1
    assert len(heard) == len(pcm) * wanted.sample_rate // 24_000


@pytest.mark.parametrize("kind", [MU_LAW, A_LAW])
def test_a_telephone_hears_one_byte_a_sample_and_the_same_tone(kind: str) -> None:
    encoder = Encoder(AudioFormat.model_validate({"type": kind}))
    sent = encoder.push((tone(1.0) * 32767).astype("<i2").tobytes()) + ""
    sound = base64.b64decode(sent) + base64.b64decode(encoder.push(b"", last=True))
    heard = np.frombuffer(decode_g711(sound, kind), "<i2") / 32767
    wanted = soxr.resample(tone(1.0), 24_000, 8000, quality="HQ")
    assert len(heard) == 8000
    noise = 10 * np.log10(np.mean((heard - wanted) ** 2) / np.mean(wanted**2))
    assert noise < -35  # of 8-bit companding: 38 dB at best


def test_sound_at_24_khz_is_passed_on_bit_for_bit() -> None:
    pcm = EVERY_SAMPLE.tobytes()
    encoder = Encoder(AudioFormat())
    assert base64.b64decode(encoder.push(pcm)) == pcm
    assert encoder.push(b"", last=True) == ""
