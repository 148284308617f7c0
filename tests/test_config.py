"""Configs are read strictly: what would change the arithmetic is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDENS

from mosstalk.config import FlowConfig, HiftConfig, LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.errors import ConfigError
from mosstalk.files import read_json
from mosstalk.reporting.sentences import read_sentences
from mosstalk.synthesis.sizes import PUBLISHED_CODEC, PUBLISHED_MODEL


def model(**changes: Any) -> LanguageModelConfig:
    return LanguageModelConfig.from_dict(PUBLISHED_MODEL | changes)


def test_the_published_config_has_forty_kv_layers() -> None:
    config = model()
    assert (config.num_shared_layers, config.num_modality_layers) == (32, 4)
    assert config.num_kv_layers == 40


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
        ("channels", 3),
        ("model_type", "qwen3"),
        ("num_hidden_layers", 40),
        ("hidden_size", "4096"),
        ("hidden_size", 0),
        ("num_key_value_heads", 7),
        ("eosp_token_id", 20_000),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(key: str, value: Any) -> None:
    name = {"num_key_value_heads": "KV heads", "rope_parameters": "rope_type"}.get(key, key)
    with pytest.raises(ConfigError, match=name):
        model(**{key: value})


@pytest.mark.parametrize(
    "key", ["hidden_size", "rms_norm_eps", "sosp_token_id", "rope_theta", "model_type"]
)
def test_a_missing_key_is_named(key: str) -> None:
    values = {name: value for name, value in PUBLISHED_MODEL.items() if name != key}
    with pytest.raises(ConfigError, match=key):
        LanguageModelConfig.from_dict(values)


def test_rope_theta_may_stand_inside_rope_parameters() -> None:
    nested = {"rope_theta": 5e5, "rope_type": "default"}
    assert model(rope_theta=None, rope_parameters=nested).rope_theta == 5e5


def test_audio_pad_is_512_where_the_file_lacks_it() -> None:
    values = {key: v for key, v in PUBLISHED_MODEL.items() if key != "audio_pad_token_id"}
    assert LanguageModelConfig.from_dict(values).audio_pad_token_id == 512


def test_other_keys_are_kept() -> None:
    extra = model(initializer_range=0.02, auto_map={"a": "b"}).extra
    assert extra["initializer_range"] == 0.02
    assert extra["auto_map"] == {"a": "b"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("encoder_causal_attention", False),
        ("quantize_causal_encoder", False),
        ("pooling_type", "max"),
        ("pooling_position", 8),
        ("quantize_position", 40),
        ("activation_function", "relu"),
        ("d_model", 1281),
    ],
)
def test_another_speech_tokenizer_is_refused_by_name(key: str, value: Any) -> None:
    changes = {key: value}
    if key == "quantize_position":
        changes["pooling_position"] = value
    with pytest.raises(ConfigError, match=key):
        SpeechTokenizerConfig.from_dict(PUBLISHED_CODEC | changes)


@pytest.mark.parametrize("kind", [FlowConfig, HiftConfig])
def test_codec_configs_round_trip_and_refuse_unknown_keys(
    kind: type[FlowConfig] | type[HiftConfig],
) -> None:
    values = json.loads(json.dumps(kind().to_dict()))
    assert kind.from_dict(values) == kind()
    with pytest.raises(ConfigError, match="frobnicate"):
        kind.from_dict(values | {"frobnicate": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"upsample_rates": ["8", 5, 3]}, "upsample_rates must hold whole numbers"),
        ({"upsample_rates": [8, 0, 3]}, "upsample_rates must hold whole numbers"),
        ({"upsample_rates": []}, "upsample_rates must hold whole numbers"),
        ({"resblock_dilation_sizes": [1, 3, 5]}, "resblock_dilation_sizes must hold whole numbers"),
        ({"resblock_kernel_sizes": [3]}, "one list of resblock_dilation_sizes per"),
        ({"source_resblock_dilation_sizes": [[1]]}, "one source block per upsampling rate"),
    ],
)
def test_sizes_of_a_vocoder_that_make_no_network_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        HiftConfig.from_dict(changes)


@pytest.mark.parametrize("case", ["flow", "flow-tails", "hift", "hift-unvoiced"])
def test_written_codec_configs_have_exactly_the_goldens_keys(case: str) -> None:
    config = read_json(GOLDENS / case / "case.json")["config"]
    kind = FlowConfig if "flow" in case else HiftConfig
    assert set(kind().to_dict()) == set(config)
    assert json.loads(json.dumps(kind.from_dict(config).to_dict())) == config


def test_a_byte_order_mark_of_an_editor_is_no_part_of_a_file(tmp_path: Path) -> None:
    config, sentences = tmp_path / "config.json", tmp_path / "sentences.txt"
    config.write_text('{"a": 1}', encoding="utf-8-sig")
    sentences.write_text("Good morning.\n", encoding="utf-8-sig")
    assert read_json(config) == {"a": 1}
    assert read_sentences(sentences) == ("Good morning.",)


@pytest.mark.parametrize(("content", "word"), [("[1]", "object"), ("{", "json"), (None, "no such")])
def test_an_unreadable_file_is_told_apart(tmp_path: Path, content: str | None, word: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=word):
        read_json(path)
