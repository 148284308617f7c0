"""How a checkpoint wants ids drawn: read strictly, by task, and overridden by who asks."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Checkpoint

from mosstalk import Limits, Pipeline, SamplingOptions
from mosstalk.checkpoints.convert import convert
from mosstalk.errors import ConfigError
from mosstalk.offline.defaults import FILE, TASKS, Choices, Defaults, read_defaults
from mosstalk.runtime.device import pick_dtype

COMMON = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2}


def written(folder: Path, values: object) -> Defaults:
    (folder / FILE).write_text(json.dumps(values))
    return read_defaults(folder)


def test_without_the_file_the_public_demos_values_hold(tmp_path: Path) -> None:
    for task in TASKS:
        choices = read_defaults(tmp_path).of(task)
        assert choices.options(seed=3) == SamplingOptions(0.6, 20, 0.95, 1.1, 3)
        assert choices.limits() == Limits(1024)


def test_the_files_values_hold_for_every_task(tmp_path: Path) -> None:
    defaults = written(tmp_path, COMMON | {"max_new_tokens": 77})
    for task in TASKS:
        assert defaults.of(task).options() == SamplingOptions(0.7, 5, 0.9, 1.2)
        assert defaults.of(task).limits() == Limits(77)


def test_a_tasks_own_values_come_before_the_others(tmp_path: Path) -> None:
    own = {"speak": {"temperature": 0.3, "max_new_tokens": 9}, "transcribe": {"do_sample": False}}
    defaults = written(tmp_path, COMMON | {"mosstalk": own})

    assert defaults.of("chat").options() == SamplingOptions(0.7, 5, 0.9, 1.2)
    assert defaults.of("speak").options() == SamplingOptions(0.3, 5, 0.9, 1.2)
    assert defaults.of("speak").limits() == Limits(9)
    assert defaults.of("transcribe").options() == SamplingOptions(0.0, 5, 0.9, 1.2)
    assert defaults.of("transcribe").limits() == Limits()


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.8}, 0.0),
        ({"do_sample": True, "temperature": 0.8}, 0.8),
        ({"do_sample": True}, 0.6),
        ({"temperature": 1}, 1.0),
        ({"temperature": None, "top_k": None}, 0.6),
    ],
)
def test_not_to_sample_is_greedy(
    tmp_path: Path, values: dict[str, object], temperature: float
) -> None:
    assert written(tmp_path, values).of("chat").options().temperature == temperature


def test_a_task_may_sample_where_the_others_do_not(tmp_path: Path) -> None:
    own = {"mosstalk": {"speak": {"do_sample": True}}}
    defaults = written(tmp_path, {"do_sample": False, "temperature": 0.8} | own)
    assert defaults.of("chat").options().temperature == 0
    assert defaults.of("speak").options().temperature == 0.8


def test_what_a_user_chose_comes_before_the_checkpoint(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, {"do_sample": False, "top_k": 5, "max_new_tokens": 77})
    asked = Choices(temperature=0.9, top_p=1.0).over(checkpoints.of("chat"))
    assert asked.options() == SamplingOptions(0.9, 5, 1.0, 1.1)
    assert asked.limits() == Limits(77)


def test_keys_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    others = {"eos_token_id": [1, 2], "transformers_version": "4.57.1", "_from_model_config": True}
    assert written(tmp_path, others) == written(tmp_path, {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": "warm"}, "temperature must be float, found 'warm'"),
        ({"temperature": True}, "temperature must be float, found True"),
        ({"temperature": -1.0}, "temperature must be 0 (greedy) or more"),
        ({"top_k": 2.5}, "top_k must be int, found 2.5"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"do_sample": 1}, "do_sample must be bool, found 1"),
        ({"max_new_tokens": 0}, "must be at least 1, not 0"),
        ({"mosstalk": []}, "mosstalk must be dict"),
        ({"mosstalk": {"sing": {}}}, "mosstalk: unknown key 'sing'; known: chat, speak"),
        ({"mosstalk": {"speak": 1}}, "mosstalk: speak must be dict, found 1"),
        ({"mosstalk": {"speak": {"top_q": 1}}}, "mosstalk.speak: unknown key 'top_q'"),
        ({"mosstalk": {"speak": {"top_p": 2}}}, "mosstalk.speak: top_p must be above 0 and"),
        ([], "holds no json object"),
    ],
)
def test_what_means_nothing_is_refused_by_name(tmp_path: Path, values: object, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        written(tmp_path, values)
    assert str(refusal.value).startswith(f"{tmp_path / FILE}: ")
    assert said in str(refusal.value)


def test_a_conversation_is_drawn_as_its_checkpoint_says(tiny: Checkpoint, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / FILE).write_text(json.dumps({"do_sample": False, "max_new_tokens": 6}))
    chat = Pipeline.load(model, tiny.codec, device="cpu").chat(speech=False)
    chat.read("hi")
    answer = chat.answer(speech=False)
    assert answer.generation.params.options.temperature == 0
    assert list(answer) == []
    assert answer.steps <= 6


def test_conversion_keeps_what_the_checkpoint_wants(tiny: Checkpoint, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / FILE).write_text(json.dumps(COMMON))
    convert(model, tmp_path / "converted", pick_dtype("float32"))
    assert read_defaults(tmp_path / "converted") == read_defaults(model)
