"""What the source reports planned, claimed and timed, and where our figure of the same is found.

Of the reports no more is known here than what stands in these rows.
"""

from dataclasses import dataclass

from mosstalk.bench.report_figures import CODEC, FIRST_AUDIO, REAL_TIME, STEP, Wanted

NOT_STATED = "not stated"
_STEP = "mosstalk bench step --random-weights full --at 1x512,64x1000"
_STEP_FP8 = "mosstalk bench step --random-weights full --precision fp8 --at 1x512,64x1000"
_PREFILL = "mosstalk bench step --prefill --random-weights full --rows 512,6+1000"
_PREFILL_FP8 = _PREFILL.replace(" --rows", " --precision fp8 --rows")
_CODEC = "mosstalk bench codec --random-weights full --replies 1,32,128 --hops 60 --memory 45000"
_ENCODE = "mosstalk bench codec --random-weights full --part encode --streams 1,8,64"
_PIPELINE = "bash tests/gpu-24gb.sh"
_SHORT = r"A hop of 5 codes.*, voice of 6\.8 s"
_LONG = r"A hop of 5 codes.*, voice of 26\.8 s"
_EARLY, _LATE = r"{} x hop 2-\d+", r"1 x hop (?!2-)\d+-\d+"
_PERFORMANCE = "[performance.md](performance.md)"
_HOPS = "within the hops above"


@dataclass(frozen=True)
class Line:
    """A row: the reports' three words on it, and ours; ``peak`` names one of ``plan.measured``,
    ``whole`` a figure of the whole pipeline.
    """

    what: str
    planned: str = NOT_STATED
    claimed: str = NOT_STATED
    timed: str = NOT_STATED
    wanted: Wanted | None = None
    peak: str | None = None
    whole: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Elsewhere:
    """A figure that others, or this project, took of another implementation; ``see``: where
    ours stands if no document has it.
    """

    what: str
    where: str
    figure: str
    wanted: Wanted | None = None
    see: str | None = None


def _steps(row: str, *, fp8: bool) -> Wanted:
    return Wanted(STEP, row, precision="fp8" if fp8 else "bfloat16")


LINES = (
    Line(
        "a step, 1 session of 512 rows, bf16",
        planned="50 tokens a second, which would be 20 ms a step",
        claimed="a formula of tokens a second, built on arithmetic, bytes counted twice; its "
        "result: not stated",
        wanted=_steps("1 x 1 row after 512", fp8=False),
        command=_STEP,
    ),
    Line(
        "the same, trunk in FP8",
        wanted=_steps("1 x 1 row after 512", fp8=True),
        command=_STEP_FP8,
    ),
    Line(
        "a step, 64 sessions of 1,000 rows, bf16",
        wanted=_steps("64 x 1 row after 1000", fp8=False),
        command=_STEP,
    ),
    Line(
        "a prompt of 512 rows, bf16",
        wanted=_steps("512 rows", fp8=False),
        command=_PREFILL,
    ),
    Line("the same, trunk in FP8", wanted=_steps("512 rows", fp8=True), command=_PREFILL_FP8),
    Line(
        "codes to sound, first hop, flow and HiFT",
        planned="BigVGAN, given the codes",
        timed="no flow decoder ran",
        wanted=Wanted(CODEC, "1 x hop first", _SHORT),
        command=_CODEC,
    ),
    Line(
        "a later hop of 5 codes, 1 reply",
        wanted=Wanted(CODEC, _EARLY.format(1), _SHORT),
        command=_CODEC,
    ),
    Line("the same, 32 replies", wanted=Wanted(CODEC, _EARLY.format(32), _SHORT), command=_CODEC),
    Line("the same, 128 replies", wanted=Wanted(CODEC, _EARLY.format(128), _SHORT), command=_CODEC),
    Line(
        "400 ms of a user's speech to codes, arriving",
        timed="nothing: without `audio_input_ids` no speech went in",
        wanted=Wanted(CODEC, "1 x 400 ms after 15 s"),
        command=_ENCODE,
    ),
    Line(
        "end of turn to first sound, whole pipeline",
        claimed="first chunk 138 ms (RTX 4090)",
        timed="a vocoder fed without a flow decoder",
        whole=FIRST_AUDIO,
        command=_PIPELINE,
    ),
    Line(
        "real-time factor, whole pipeline",
        claimed="1.38 (RTX 4090)",
        timed="a vocoder fed without a flow decoder; a factor was computed from a single prefill",
        whole=REAL_TIME,
        command=_PIPELINE,
    ),
    Line("device memory, bf16, codec and 8,192 rows", peak="measured, bf16, codec and 8,192 rows"),
    Line("the same, trunk in FP8", peak="measured, fp8, codec and 8,192 rows"),
)

_OURS, _SERVER = "H200, for this project", "A800-80G, published"
_ABOVE = "in the first table, on another card"
_AUDIO_STEP = _steps("1 x 1 row after 512", fp8=False)
ELSEWHERE = (
    Elsewhere(
        "a hop of 5 codes, codec reference, float32, voice of 7 s, 8 codes said",
        _OURS,
        "286 ms",
        Wanted(CODEC, _EARLY.format(1), _SHORT),
    ),
    Elsewhere("the same, 253 codes said", _OURS, "503 ms", Wanted(CODEC, _LATE, _SHORT)),
    Elsewhere(
        "the same, voice of 27 s", _OURS, "514 to 969 ms", Wanted(CODEC, _EARLY.format(1), _LONG)
    ),
    Elsewhere(
        "the estimator alone, bf16, torch operations in a CUDA graph, 1 and 32 at once",
        _OURS,
        "39 and 52 ms",
        see=_HOPS,
    ),
    Elsewhere("the same by torch.compile, 1", _OURS, "31 ms", see=_HOPS),
    Elsewhere("HiFT reference, 28 frames, eager", _OURS, "11 ms", see=_PERFORMANCE),
    Elsewhere(
        "a prompt of 512 rows, transformers, eager", _OURS, "29.8 ms", _steps("512 rows", fp8=False)
    ),
    Elsewhere("a step, both blocks, transformers, eager", _OURS, "64.1 ms", _AUDIO_STEP),
    Elsewhere(
        "a step, both blocks, plain torch operations in a CUDA graph",
        _OURS,
        "7.06 ms",
        _AUDIO_STEP,
    ),
    Elsewhere("the same, audio block alone", _OURS, "6.06 ms", _AUDIO_STEP),
    Elsewhere(
        "the only public MOSS-Speech server, streamed: first audio",
        _SERVER,
        "2.56 s",
        see=_ABOVE,
    ),
    Elsewhere("its real-time factor", _SERVER, "3.87, p95 5.64", see=_ABOVE),
    Elsewhere("its memory", _SERVER, "26.5 GiB, out of memory on 24 GB", see=_ABOVE),
)
