"""``mosstalk plan``: sums of what is really there, limits that nothing can beat."""

import json
import math
import re
import shlex
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from conftest import Checkpoint, examples
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mosstalk.cli import app
from mosstalk.cli.plan import _CARDS, memory_of
from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_pages import FlowOptions, PageLayout
from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.kv_store import KVStore
from mosstalk.errors import ConfigError, DeviceError, OptionError
from mosstalk.models.codec_folder import open_part
from mosstalk.models.language_model import IN_LAYER
from mosstalk.models.weights import Store, fold_weight_norm, open_sharded
from mosstalk.plan.crowd import heard_s, replies_at_once
from mosstalk.plan.fit import Wish, advice, plan_of
from mosstalk.plan.limits import CARDS, cards, limits_of
from mosstalk.plan.sizes import (
    SOUND_DTYPE,
    Configs,
    Rates,
    codec_on_meta,
    codec_parts,
    language_parts,
    measured,
)
from mosstalk.prepared.start import configs_of
from mosstalk.reply_options import SoundRequest
from mosstalk.synthesis.sizes import TINY
from mosstalk.synthesis.weights import random_codec

GIB = 2**30


@pytest.fixture(scope="module")
def published() -> Configs:
    return configs_of()


def run(words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *shlex.split(words)], catch_exceptions=False)


def stored_bytes(store: Store) -> int:
    return sum(tensor.load().nbytes for tensor in store.values())


def test_the_language_model_is_its_tensors_on_disk(tiny: Checkpoint) -> None:
    config, store = configs_of(tiny.model, tiny.codec).model, open_sharded(tiny.model)
    parts = language_parts(config, "bf16")
    assert sum(part.bytes for part in parts) == stored_bytes(store)
    assert sum(part.weights for part in parts) == sum(prod(t.shape) for t in store.values())
    blocks = {part.name: part.bytes for part in parts}
    for name in ("text", "audio"):
        own = {k: t for k, t in store.items() if k.startswith(f"model.{name}_block.")}
        assert blocks[f"{name} block"] == stored_bytes(own)


def test_an_fp8_trunk_has_a_byte_a_weight_and_a_scale_an_output(tiny: Checkpoint) -> None:
    config, store = configs_of(tiny.model, tiny.codec).model, open_sharded(tiny.model)
    plain, fp8 = (
        {part.name: part for part in language_parts(config, kind)} for kind in ("bf16", "fp8")
    )
    products = {name for names in IN_LAYER.values() for name in names if "_proj" in name}
    saved = sum(
        prod(t.shape) - 4 * t.shape[0]
        for name, t in store.items()
        if name.startswith("model.shared_block.") and name.split(".", 4)[4] in products
    )
    assert saved > 0
    assert plain["trunk"].bytes - fp8["trunk"].bytes == saved
    assert [p for p in plain.values() if p.name != "trunk"] == [
        p for p in fp8.values() if p.name != "trunk"
    ]


def test_the_codec_is_its_tensors_on_disk(tiny: Checkpoint) -> None:
    codec = codec_on_meta(configs_of(tiny.model, tiny.codec))
    parts = {part.name: part for part in codec_parts(codec)}
    heard = open_sharded(tiny.codec)
    used = sum(prod(t.shape) for name, t in heard.items() if not codec.tokenizer.unused(name))
    assert parts["speech tokenizer"].weights == used
    assert parts["speech tokenizer"].bytes == 4 * used
    flow = open_part(tiny.codec / "flow", "flow-chunk-5")
    spoken = parts["flow encoder"].weights + parts["flow estimator"].weights
    assert spoken == sum(prod(t.shape) for t in flow.values())
    vocoder = fold_weight_norm(open_part(tiny.codec / "flow", "hift"))
    assert parts["vocoder"].weights == sum(prod(t.shape) for t in vocoder.values())


def test_packed_weights_take_what_was_planned() -> None:
    codec = random_codec(TINY, torch.device("cpu"))
    parts = {part.name: part.bytes for part in codec_parts(codec)}
    options = FlowOptions(dtype=SOUND_DTYPE, paged=True, pages=2)
    packed = batched_flow(codec.flow, options).figures().weight_bytes
    # The embedding of codes and the tables' weights are used as they are, and not counted there.
    planned = parts["flow encoder"] + parts["flow estimator"]
    unpacked = codec.flow.input_embedding.weight.nbytes
    assert packed + unpacked <= planned <= 1.1 * (packed + unpacked)
    held = BatchedHift(codec.vocoder, HiftOptions(dtype="float16", replies=1)).figures()
    assert parts["vocoder"] == pytest.approx(held.weight_bytes, rel=0.02)


def test_the_published_model_has_its_known_sizes(published: Configs) -> None:
    weights = {part.name: part.weights for part in language_parts(published.model, "bf16")}
    assert sum(weights.values()) == pytest.approx(9.1e9, rel=0.001)
    assert weights["trunk"] == pytest.approx(6.17e9, rel=0.001)
    assert weights["text block"] == weights["audio block"] == pytest.approx(0.77e9, rel=0.01)
    rates = Rates.of(published)
    assert rates.row == (160 + 8) * 1024
    assert (rates.reply_pages - 1) * rates.page == pytest.approx(224 * 2**20, rel=0.001)
    assert rates.page / rates.page_s == pytest.approx(117e6, rel=0.01)


def test_a_row_takes_what_the_store_allocates(tiny: Checkpoint) -> None:
    configs, pool = configs_of(tiny.model, tiny.codec), BlockPool(4, 16)
    store = KVStore.allocate(configs.model, pool, torch.device("cpu"), torch.bfloat16)
    held = store.keys.nbytes + store.values.nbytes + store.hidden.nbytes
    assert held == Rates.of(configs).row * 4 * 16


def test_the_flow_gets_the_pages_that_were_planned(published: Configs) -> None:
    plan = plan_of(published, Wish(80 * GIB, sessions=3, voices_s=26.9))
    layout = PageLayout(published.flow, published.flow.n_timesteps, SOUND_DTYPE)
    assert plan.costs.page == layout.bytes
    ask = SoundRequest(memory_mib=plan.flow_memory_mib)
    pages = DecoderOptions.of(ask, torch.device("cuda")).flow.page_count(layout)
    assert pages == 3 * plan.costs.reply_pages + plan.voice_pages
    by_replies = [FlowOptions(context_s=2.0, replies=n).page_count(layout) for n in (3, 4)]
    assert by_replies[1] - by_replies[0] == plan.costs.reply_pages


@pytest.mark.parametrize(
    ("sessions", "replies", "heard"),
    [(1, 1, 31), (32, 32, 992), (64, 64, 1248), (128, 96, 1760), (256, 160, 2784)],
)
def test_memory_is_for_what_is_at_work_and_not_for_every_session(
    published: Configs, sessions: int, replies: int, heard: int
) -> None:
    assert (replies_at_once(sessions), heard_s(sessions)) == (replies, heard)
    plan = plan_of(published, Wish(141 * 10**9, sessions=sessions))
    sizes = {item.name: item.bytes for item in plan.items}
    assert sizes["replies"] == replies * plan.costs.reply
    assert sizes["turns being heard"] == round(heard * plan.costs.heard)
    pages = replies * plan.costs.reply_pages + plan.voice_pages
    assert plan.flow_memory_mib == math.ceil(pages * plan.costs.page / 2**20)


@examples(100)
@given(sessions=st.integers(0, 2000))
def test_another_session_takes_no_memory_from_those_there_are(sessions: int) -> None:
    assert replies_at_once(sessions + 1) - replies_at_once(sessions) in (0, 1)
    # So nobody who talks for long takes it from anybody else.
    assert sessions > 32 or heard_s(sessions) >= sessions * math.ceil(30 / 1.28) * 1.28
    assert heard_s(sessions + 1) > heard_s(sessions)


def test_fewer_euler_steps_take_smaller_pages(published: Configs) -> None:
    pages = [plan_of(published.with_steps(n), Wish(80 * GIB)).costs.page for n in (None, 10, 5)]
    assert pages[0] == pages[1]
    assert pages[2] == pytest.approx(pages[1] / 2, rel=0.02)
    found = run("--gpu-memory 141GB --max-sessions 256 --precision fp8 --flow-steps 5")
    assert found.exit_code == 0
    assert "serve --flow-steps 5 --model MODEL" in found.output


WISHES = st.builds(
    Wish,
    memory_bytes=st.integers(2**30, 2**38),
    precision=st.sampled_from(["bf16", "fp8"]),
    sessions=st.integers(1, 300),
    rows=st.integers(1, 40960),
    voices_s=st.floats(0, 300),
)


@examples(100)
@given(wish=WISHES, more=st.integers(1, 2**36))
def test_more_memory_never_fits_fewer(published: Configs, wish: Wish, more: int) -> None:
    plan = plan_of(published, wish)
    larger = replace(plan, wish=replace(wish, memory_bytes=wish.memory_bytes + more))
    assert larger.rows >= plan.rows
    assert larger.full_sessions >= plan.full_sessions
    assert larger.fits or not plan.fits
    crowded = replace(plan, wish=replace(wish, sessions=wish.sessions + 1))
    assert crowded.rows <= plan.rows


@examples(100)
@given(wish=WISHES)
def test_what_fits_is_within_the_memory(published: Configs, wish: Wish) -> None:
    plan = plan_of(published, wish)
    assert plan.fits == (plan.needed_bytes <= wish.memory_bytes)
    taken = plan.besides_rows_bytes + plan.rows * plan.costs.row
    assert taken <= wish.memory_bytes or not plan.rows
    alone = plan_of(published, replace(wish, sessions=plan.full_sessions))
    each = -(-wish.rows // 16) * 16
    assert not plan.full_sessions or alone.rows >= plan.full_sessions * each


def changed(wish: Wish, words: str) -> Wish:
    """``wish`` with the options that an advice names."""
    names = {"precision": str, "embeddings": str, "max-sessions": int, "max-rows": int}
    names |= {"voices-s": float}
    fields = {"max-sessions": "sessions", "max-rows": "rows", "voices-s": "voices_s"}
    found = re.findall(r"--([a-z-]+) (\S+?),?(?= |$)", words)
    return replace(wish, **{fields.get(name, name): names[name](value) for name, value in found})


@examples(100)
@given(wish=WISHES)
def test_whatever_is_advised_fits(published: Configs, wish: Wish) -> None:
    plan = plan_of(published, wish)
    if plan.fits:
        return
    for words in advice(plan):
        gib = re.search(r"at least ([\d.]+) GiB", words)
        if gib is None:
            assert plan_of(published, changed(wish, words)).fits, words
        else:
            assert wish.memory_bytes < (float(gib[1]) + 0.1) * GIB


def test_the_command_says_what_to_change_and_that_then_fits() -> None:
    tight = "--gpu-memory 24GiB --max-sessions 2"
    found = run(tight)
    assert found.exit_code == 1
    assert "does not fit" in found.output
    changes = re.findall(r"change: (.*)", found.output)
    assert len(changes) >= 2
    for words in changes:
        again = run(f"{tight} {words}")
        assert again.exit_code == 0, words
        assert "serve --model MODEL --codec CODEC --max-sessions 2 --codec-memory" in again.output


def test_a_small_card_is_told_how_much_there_must_be() -> None:
    found = run("--gpu-memory 8GiB")
    assert found.exit_code == 1
    needed = re.search(r"at least ([\d.]+) GiB", found.output)
    assert needed is not None
    least = "--precision fp8 --embeddings host --max-rows 1024 --voices-s 3"
    assert run(f"--gpu-memory {float(needed[1]) + 0.1}GiB {least}").exit_code == 0


def test_the_document_holds_what_is_printed(tiny: Checkpoint) -> None:
    folders = f"--model {tiny.model} --codec {tiny.codec}"
    words = f"--gpu-memory 12GiB --gpu a100 {folders} --json"
    document = json.loads(run(words).output)
    assert document["format"] == "mosstalk-plan-1"
    assert document["weights"] == "synthetic"
    plan = document["plan"]
    assert plan["fits"]
    assert sum(item["bytes"] for item in plan["items"]) + plan["left_bytes"] == 12 * GIB
    assert plan["beside"] == []
    assert document["limits"]["cards"]["a100"]["fp8"] is None
    assert document["limits"]["cards"]["a100"]["bf16"]["step_ms"] > 0
    assert f"{plan['rows']:,}" in run(words.removesuffix("--json")).output


def test_others_figures_stand_beside_the_published_sizes() -> None:
    output = run("--gpu-memory 80GB").output
    assert re.search(r"only public MOSS-Speech server, published +26.50", output)
    assert re.search(r"source reports, their own estimate +not stated", output)


def test_a_measured_figure_names_its_device() -> None:
    for peak in measured().peaks:
        assert peak.gib is None or peak.device
        assert not peak.name.startswith("measured") or bool(peak.gib) == bool(peak.command)
    assert {each.basis for each in measured().overheads} <= {"measured", "set aside", "assumed"}


def test_a_table_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text('{"format": "mosstalk-measured-9"}')
    with pytest.raises(ConfigError, match="mosstalk-measured-9"):
        measured(path)


def test_limits_are_bytes_over_bandwidth(published: Configs) -> None:
    card = replace(CARDS["h200"], bandwidth_gb_s=4290)
    # 3.26 and 1.83 ms at a measured copy's 4.29 TB/s.
    assert limits_of(published, card, "bf16").step_ms == pytest.approx(3.26, rel=0.01)
    assert limits_of(published, card, "fp8").step_ms == pytest.approx(1.83, rel=0.015)
    faster = limits_of(published, replace(card, bandwidth_gb_s=8580), "bf16")
    assert faster.step_ms == pytest.approx(3.26 / 2, rel=0.01)
    assert faster.prompt_ms == limits_of(published, card, "bf16").prompt_ms


def test_first_audio_and_real_time_are_sums_of_their_parts(published: Configs) -> None:
    found = limits_of(published, CARDS["h100"], "bf16")
    assert found.first_audio_ms
    assert found.step_ms
    assert found.first_audio_ms > found.heard_ms + 8 * found.step_ms + found.hop_ms
    assert found.real_time_factor == pytest.approx(
        (5 * found.step_ms + found.hop_ms) / 400, rel=0.02
    )


def test_a_card_without_fp8_or_room_is_said_to_be_one(published: Configs) -> None:
    with pytest.raises(DeviceError, match="a100 has no FP8"):
        limits_of(published, CARDS["a100"], "fp8")
    assert limits_of(published, CARDS["l4"], "fp8").crowd_ms is None
    output = run("--gpu all").output
    assert "Computed, not measured" in output
    assert re.search(r"1 x 512 rows, ms, fp8 +[\d.]+ +[\d.]+ +[\d.]+ +- ", output)
    assert re.search(r"64 x 1000 rows, ms, bf16 +no room +no room +[\d.]+", output)
    for card in cards(["all"]):
        assert card.source.split(",")[0] in " ".join(output.split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "give --gpu-memory SIZE, --gpu CARD or both"),
        ("--gpu-memory 24", "--gpu-memory 24: give something like 24GiB"),
        ("--gpu-memory 0GiB", "--gpu-memory 0GiB: give something like 24GiB"),
        ("--gpu rtx-5000", "--gpu rtx-5000: choose of rtx-4090, l4"),
        ("--gpu h100 --precision int4", "--precision must be bf16 or fp8, not 'int4'"),
        ("--gpu a100 --precision fp8", "a100 has no FP8 products"),
        ("--gpu-memory 24GiB --model absent", "no such file"),
    ],
)
def test_a_wrong_option_is_refused(words: str, complaint: str) -> None:
    found = run(words)
    assert found.exit_code == 2
    assert complaint in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_memory_is_read_with_its_unit() -> None:
    assert memory_of("24GiB") == 24 * GIB
    assert memory_of("23.5 GiB") == int(23.5 * GIB)
    assert memory_of("80GB") == 80 * 10**9
    assert memory_of("24564MiB") == 24564 * 2**20
    with pytest.raises(OptionError):
        memory_of("-1GiB")


def test_the_help_names_every_card() -> None:
    assert tuple(CARDS) == _CARDS
