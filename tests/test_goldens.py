"""Golden cases pass, and ``verify`` fails, refuses and names what it should.

Cases are found by what their ``case.json`` says; no test knows one by its folder's name.
"""

import json
import lzma
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOLDENS, ROOT, Run, plain_copy, refused
from safetensors.torch import load_file, save_file
from torch import Tensor

from mosstalk.verify.compare import Check, Comparer
from mosstalk.verify.run import COMPONENTS, judge_cases, run_case

CPU = torch.device("cpu")
CASES = sorted(path.parent for path in GOLDENS.glob("*/case.json"))
EXPECTED = "expected.safetensors"

# Slow: the second flow; one is enough for what ``verify`` does with it.
each_case = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(
            path, id=path.name, marks=[pytest.mark.slow] if path.name == "flow-tails" else []
        )
        for path in CASES
    ],
)


def component_of(folder: Path) -> str:
    return str(json.loads((folder / "case.json").read_text())["component"])


def smallest(component: str) -> Path:
    """The golden of a component with the least to load."""
    of_it = [folder for folder in CASES if component_of(folder) == component]
    return min(of_it, key=lambda folder: sum(file.stat().st_size for file in folder.iterdir()))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def edit_settings(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "case.json"
    settings = json.loads(path.read_text())
    edit(settings)
    path.write_text(json.dumps(settings))


def scale(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name] * factor

    return edit


def nudge(name: str, amount: float) -> Callable[[dict[str, Tensor]], None]:
    """Change the last value of a tensor: the last id of a reply conditions nothing after it."""

    def edit(tensors: dict[str, Tensor]) -> None:
        value = tensors[name].clone()
        value.view(-1)[-1] += type(value.view(-1)[-1].item())(amount)
        tensors[name] = value

    return edit


@lru_cache
def checks_of(folder: Path, dtype: torch.dtype) -> list[Check]:
    return run_case(folder, CPU, dtype)


def out_of_bounds(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if "OUT OF BOUNDS" in line]


def is_slow(folder: Path, dtype: torch.dtype) -> bool:
    """The second flow, and other precisions than float32, in which every comparison counts.

    HiFT is here in all of them; the fast path's tests have language models in bfloat16, and
    codecs in float16.
    """
    return folder.name == "flow-tails" or (dtype != torch.float32 and folder.name != "hift")


PRECISIONS = [
    pytest.param(
        folder,
        dtype,
        id=f"{folder.name}-{dtype}",
        marks=[pytest.mark.slow] if is_slow(folder, dtype) else [],
    )
    for folder in CASES
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("folder", "dtype"), PRECISIONS)
def test_every_golden_passes(folder: Path, dtype: torch.dtype) -> None:
    checks = checks_of(folder, dtype)

    assert checks
    assert [check for check in checks if not check.passed] == []


@each_case
def test_in_float32_every_comparison_counts(folder: Path) -> None:
    assert all(check.judged for check in checks_of(folder, torch.float32))


def test_the_goldens_hold_every_component() -> None:
    assert {component_of(folder) for folder in CASES} == set(COMPONENTS)


def test_verify_prints_each_tensors_error_beside_its_bound(mosstalk: Run) -> None:
    cases = [smallest(component) for component in COMPONENTS]
    run = mosstalk("verify", *cases, GOLDENS / "README.md")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "README.md: a file, not a case folder; skipped" in run.stdout
    assert "not compared" not in run.stdout
    printed = dict.fromkeys(re.findall(r"^  (\S+) +\S+ of (\S+) +ok$", run.stdout, re.MULTILINE))
    checks = [check for folder in cases for check in checks_of(folder, torch.float32)]
    bounded = [(check.name, f"{check.bound:.2e}") for check in checks if check.bound]
    assert set(printed) == set(bounded)
    total = f"{len(cases)} cases, {len(checks)} comparisons on cpu in float32: {len(checks)} within"
    assert total in run.stdout.splitlines()[-1]


@each_case
def test_a_change_to_any_expected_tensor_is_found_and_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [check.name for check in checks_of(folder, torch.float32)]

    def change_all(tensors: dict[str, Tensor]) -> None:
        for name in tensors.keys() & set(names):
            # 3 % of the largest value is far above float32 rounding; ids move by one.
            size = 0.03 * float(tensors[name].abs().max())
            nudge(name, size if tensors[name].is_floating_point() else -1)(tensors)

    changed = plain_copy(folder, tmp_path / "case")
    edit_tensors(changed / EXPECTED, change_all)
    tensors = set(load_file(changed / EXPECTED)) & set(names)

    assert judge_cases([changed], CPU, torch.float32).exit_code == 1
    assert tensors <= set(out_of_bounds(capsys.readouterr().out))
    assert tensors


@pytest.mark.parametrize(
    ("component", "file", "weight", "found_in"),
    [
        (
            "language_model",
            "model.safetensors",
            "model.shared_block.layers.0.mlp.down_proj.weight",
            "trunk_hidden",
        ),
        (
            "language_model",
            "model.safetensors",
            "model.audio_block.layers.0.self_attn.k_norm.weight",
            "prefill_audio_logits",
        ),
        ("speech_tokenizer", "model.safetensors", "encoder.layers.0.fc1.weight", "pooled"),
        pytest.param(
            "speech_tokenizer",
            "model.safetensors",
            "encoder.codebook.weight",
            "distances",
            marks=pytest.mark.slow,
        ),
        # Slow: a flow's wrong weight shows as its wrong token does, below; second weights.
        pytest.param(
            *("flow", "flow.safetensors", "encoder_proj.weight", "offline.mel"),
            marks=pytest.mark.slow,
        ),
        ("hift", "hift.safetensors", "conv_post.parametrizations.weight.original0", "wave"),
        pytest.param(
            "hift",
            "hift.safetensors",
            "f0_predictor.classifier.weight",
            "f0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_weight_two_percent_off_is_found_and_named(
    component: str,
    file: str,
    weight: str,
    found_in: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = plain_copy(smallest(component), tmp_path / "case")
    edit_tensors(case / file, scale(weight, 1.02))

    assert judge_cases([case], CPU, torch.float32).exit_code == 1
    assert any(name.endswith(found_in) for name in out_of_bounds(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("component", "name", "found_in"),
    [
        ("flow", "run0.tokens", "run0.offline.mel"),
        # Slow: the same inputs of a flow, before the reply's own.
        pytest.param("flow", "prompt_tokens", "run0.offline.mel", marks=pytest.mark.slow),
        ("speech_tokenizer", "clip0.tokens", "clip0.tokens"),
        ("language_model", "one_row.greedy_plain.rows", "one_row.greedy_plain.rows"),
        ("language_model", "starts_in_audio_mode.prompt", "starts_in_audio_mode.trunk_hidden"),
        ("prompt_mel", "pcm16", "mel"),
    ],
)
def test_one_other_token_row_or_sample_is_found_and_named(
    component: str, name: str, found_in: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = plain_copy(smallest(component), tmp_path / "case")
    edit_tensors(case / EXPECTED, nudge(name, 500 if component == "prompt_mel" else -1))

    assert judge_cases([case], CPU, torch.float32).exit_code == 1
    assert found_in in out_of_bounds(capsys.readouterr().out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_still_finds_a_wrong_result(dtype: torch.dtype, tmp_path: Path) -> None:
    # The size of what a forgotten residual or factor does; bfloat16's bound is 20 %.
    case = plain_copy(smallest("hift"), tmp_path / "case")
    edit_tensors(case / EXPECTED, scale("wave", 1.5))

    assert judge_cases([case], CPU, dtype).exit_code == 1


def test_lower_precision_compares_ids_without_judging_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = plain_copy(smallest("speech_tokenizer"), tmp_path / "case")
    edit_tensors(case / EXPECTED, nudge("clip0.tokens", -1))

    assert judge_cases([case], CPU, torch.float16).exit_code == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if " clip0.tokens " in x)
    assert "not judged" in line
    assert "of 26 equal" in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_out_of_bounds(dtype: torch.dtype, bad: float) -> None:
    found = torch.ones(4)
    found[2] = bad

    assert not Comparer(dtype).tensor("mel", found, torch.ones(4)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_of_another_shape_is_out_of_bounds(dtype: torch.dtype) -> None:
    check = Comparer(dtype).tensor("mel", torch.zeros(4, 1), torch.zeros(4))

    assert not check.passed
    assert check.note == "shape [4, 1], expected [4]"


def test_more_or_fewer_ids_than_expected_are_out_of_bounds() -> None:
    compare, expected = Comparer(torch.float32), torch.tensor([1, 2, 3])

    assert not compare.ids("rows", [1, 2], expected).passed
    assert not compare.ids("rows", [1, 2, 3, 4], expected).passed
    assert compare.ids("rows", [1, 2, 3], expected).passed


def test_a_case_out_of_bounds_makes_the_command_exit_1(mosstalk: Run, tmp_path: Path) -> None:
    case = plain_copy(smallest("prompt_mel"), tmp_path / "case")
    edit_tensors(case / EXPECTED, scale("mel", 1.01))

    run = mosstalk("verify", "case")

    assert run.returncode == 1, run.stderr
    assert out_of_bounds(run.stdout) == ["mel"]
    assert "0 within bounds, 1 out" in run.stdout


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def torn_packed(folder: Path) -> None:
    plain = folder / EXPECTED
    packed = plain.with_name(f"{EXPECTED}.xz")
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    truncate(packed)
    plain.unlink()


BREAKAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no-case": ("prompt_mel", lambda f: (f / "case.json").unlink(), "case.json: no such file"),
    "no-expected": ("prompt_mel", lambda f: (f / EXPECTED).unlink(), f"{EXPECTED}: no such file"),
    "torn-expected": ("prompt_mel", lambda f: truncate(f / EXPECTED), "damaged or truncated"),
    "torn-packed": ("prompt_mel", torn_packed, f"{EXPECTED}.xz: damaged or truncated"),
    "torn-weights": (
        "hift",
        lambda f: truncate(f / "hift.safetensors"),
        "hift.safetensors: damaged or truncated",
    ),
    "no-weights": (
        "hift",
        lambda f: (f / "hift.safetensors").unlink(),
        "hift.safetensors: no such file",
    ),
    "tensor-gone": (
        "prompt_mel",
        lambda f: edit_tensors(f / EXPECTED, lambda tensors: tensors.pop("mel")),
        "tensor 'mel' is missing",
    ),
    "weight-gone": (
        "hift",
        lambda f: edit_tensors(
            f / "hift.safetensors", lambda tensors: tensors.pop("conv_pre.bias")
        ),
        "1 tensor missing: conv_pre.bias",
    ),
    "unknown-component": (
        "prompt_mel",
        lambda f: edit_settings(f, lambda v: v.update(component="telepathy")),
        "component 'telepathy' is none of language_model,",
    ),
    "not-json": (
        "prompt_mel",
        lambda f: (f / "case.json").write_text('{"component":'),
        "case.json: not readable as json",
    ),
    "no-run-key": (
        "flow",
        lambda f: edit_settings(f, lambda v: v["runs"][0].pop("final_start")),
        "'final_start'",
    ),
    "no-config": (
        "prompt_mel",
        lambda f: edit_settings(f, lambda v: v.pop("config")),
        "key 'config' is missing",
    ),
}


def test_unreadable_cases_exit_2_naming_why_while_readable_ones_are_run(
    mosstalk: Run, tmp_path: Path
) -> None:
    for name, (component, damage, _) in BREAKAGES.items():
        damage(plain_copy(smallest(component), tmp_path / name))
    good = smallest("prompt_mel")

    run = mosstalk("verify", *BREAKAGES, "not-there", good)

    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    why = {name: reason for name, (_, _, reason) in BREAKAGES.items()}
    why["not-there"] = "no such folder"
    lines = run.stdout.splitlines()
    for name, reason in why.items():
        line = next(x for x in lines if x.startswith(f"{name}: cannot be read: "))
        assert reason in line
    assert re.search(rf"^{good.name}: prompt_mel.*\n  mel .* ok$", run.stdout, re.MULTILINE)
    assert lines[-1] == f"{len(why)} of {len(why) + 1} folders could not be read"


def lose_a_column(name: str) -> Callable[[Path], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:, :-1]

    return lambda folder: edit_tensors(folder / EXPECTED, edit)


@pytest.mark.parametrize(
    ("component", "damage"),
    [
        ("flow", lose_a_column("prompt_mel")),
        ("hift", lose_a_column("harmonic_noise")),
        ("language_model", lose_a_column("one_row.prompt")),
        ("prompt_mel", lambda f: edit_settings(f, lambda v: v.update(config="default"))),
        ("prompt_mel", lambda f: edit_settings(f, lambda v: v["config"].update(hop_size=0))),
    ],
)
def test_files_that_do_not_fit_each_other_are_an_unreadable_case(
    component: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    case = plain_copy(smallest(component), tmp_path / "case")
    damage(case)

    assert judge_cases([case], CPU, torch.float32).exit_code == 2


def test_files_alone_are_no_cases(mosstalk: Run, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# nothing to run\n")

    assert "no case folders" in refused(mosstalk("verify", "README.md"))


def test_an_expected_tensor_nobody_compares_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = plain_copy(smallest("prompt_mel"), tmp_path / "case")
    edit_tensors(case / EXPECTED, lambda tensors: tensors.update(pitch=torch.zeros(3)))

    assert judge_cases([case], CPU, torch.float32).exit_code == 0
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "not com" in line]
    assert named == ["pitch"]


def test_a_case_folders_name_means_nothing(tmp_path: Path) -> None:
    # Every case takes the name of the next, which is of another component; a flow takes long.
    cases = [smallest(component) for component in COMPONENTS if component != "flow"]
    names = [folder.name for folder in cases]
    renamed = [
        plain_copy(folder, tmp_path / name)
        for folder, name in zip(cases, names[1:] + names[:1], strict=True)
    ]

    for folder, other in zip(cases, renamed, strict=True):
        before = [(check.name, check.bound) for check in checks_of(folder, torch.float32)]
        after = run_case(other, CPU, torch.float32)
        assert [(check.name, check.bound) for check in after] == before
        assert all(check.passed for check in after)


def test_no_case_is_known_by_name_in_the_source() -> None:
    # A folder named after its component is no special case; its name must be in the source.
    names = {folder.name for folder in CASES} - set(COMPONENTS)
    sources = sorted((ROOT / "src" / "mosstalk" / "verify").glob("*.py"))

    assert names
    assert sources
    for source in sources:
        assert [name for name in names if name in source.read_text()] == []
