"""Listening to a codec from outside: what ``record_reference.py`` knows of objects it cannot name.

The public codec's attribute names are not relied on. Objects are found by what their class is
called, their methods are wrapped while they run, and tensors are taken from arguments by name.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

NOISE_FRAMES = 8
DEEPEST = 7
_LEAVES = (str, bytes, int, float, type, FunctionType, MethodType, ModuleType)
PARTS = {
    "flow": (re.compile("MaskedDiff", re.IGNORECASE), "inference"),
    "hift": (re.compile("HiFT", re.IGNORECASE), "inference"),
    "encoder": (re.compile("WhisperVQ", re.IGNORECASE), "forward"),
    "f0": (re.compile("F0Predictor", re.IGNORECASE), "forward"),
}
"""Objects to listen to: what their class may be called, and the method that is wrapped."""


@dataclass
class Recording:
    """One case to be written: tensors by name, settings of ``case.json``, notes."""

    component: str
    settings: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Call:
    """One call of a wrapped method: its arguments by name, and what it returned."""

    arguments: dict[str, Any]
    result: Any

    def first(self, *names: str) -> Any:
        """The first argument of these names that there is."""
        return next((self.arguments[n] for n in names if self.arguments.get(n) is not None), None)


def reachable(root: Any) -> Iterator[Any]:
    """Objects that can be reached from ``root`` through attributes, lists and dicts."""
    seen, level = set[int](), [root]
    for _ in range(DEEPEST):
        following = []
        for thing in level:
            if id(thing) in seen or isinstance(thing, _LEAVES):
                continue
            seen.add(id(thing))
            yield thing
            following += _inside(thing)
        level = following


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, list | tuple):
        return list(thing)
    attributes = getattr(thing, "__dict__", {})
    modules = list((attributes.get("_modules") or {}).values())
    return [*attributes.values(), *modules]


def find_parts(root: Any) -> dict[str, Any]:
    """The outermost object of each kind in ``PARTS`` that has the method to wrap."""
    parts: dict[str, Any] = {}
    for thing in reachable(root):
        for kind, (pattern, method) in PARTS.items():
            named = pattern.search(type(thing).__name__)
            if kind not in parts and named and callable(getattr(thing, method, None)):
                parts[kind] = thing
    return parts


@contextmanager
def listening(parts: dict[str, Any]) -> Iterator[dict[str, list[Call]]]:
    """Wrap each part's method while the block runs, and collect its calls."""
    calls: dict[str, list[Call]] = {kind: [] for kind in PARTS}
    with ExitStack() as undo:
        for kind, part in parts.items():
            method = PARTS[kind][1]
            setattr(part, method, _wrapped(getattr(part, method), calls[kind]))
            undo.callback(delattr, part, method)
        yield calls


def _wrapped(method: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        arguments = dict(bound.arguments)
        arguments |= arguments.pop("kwargs", {}) or {}
        result = method(*args, **kwargs)
        calls.append(Call(arguments, result))
        return result

    return wrapper


def plain(tensor: Any) -> Any:
    """A tensor on the CPU without its batch of one; floats in float32."""
    tensor = tensor.detach().cpu()
    tensor = tensor[0] if tensor.ndim > 1 and tensor.shape[0] == 1 else tensor
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _results(call: Call) -> list[Any]:
    return list(call.result) if isinstance(call.result, list | tuple) else [call.result]


def add_flow(case: Recording, torch: Any, module: Any, calls: list[Call], files: Path) -> None:
    """Inputs and mel of the last whole reply that the flow decoded; ``files`` holds its .pt."""
    whole = [call for call in calls if call.arguments.get("finalize", True)]
    if len(calls) > 1:
        case.notes.append(f"the flow was called {len(calls)} times; the last whole call is kept")
    if not whole or whole[-1].arguments.get("streaming"):
        case.notes.append("every call was a part of a streamed reply: no whole mel to record")
        return
    call = whole[-1]
    wanted = {
        "tokens": call.first("token", "tokens"),
        "prompt_tokens": call.first("prompt_token", "prompt_tokens"),
        "prompt_mel": call.first("prompt_feat", "prompt_mel", "prompt_speech_feat"),
        "speaker_embedding": call.first("embedding", "spk_embedding"),
    }
    absent = [name for name, value in wanted.items() if value is None]
    if absent:
        have = ", ".join(call.arguments)
        case.notes.append(f"arguments not found: {', '.join(absent)}; there were: {have}")
        return
    case.tensors = {name: plain(value) for name, value in wanted.items()}
    case.tensors["offline.mel"] = plain(_results(call)[0])
    noise = getattr(getattr(module, "decoder", None), "rand_noise", None)
    if noise is not None:
        case.tensors["noise_head"] = plain(noise)[:, :NOISE_FRAMES]
    case.settings["flow_name"] = _file_of(case, torch, module, files)


def _file_of(case: Recording, torch: Any, module: Any, folder: Path) -> str:
    """Which file the flow was loaded from, told by one of its matrices."""
    name, ours = "encoder_proj.weight", module.state_dict().get("encoder_proj.weight")
    for path in sorted(folder.glob("flow*.pt")):
        theirs = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get(name)
        if _same(torch, ours, theirs):
            return path.stem
    case.notes.append(f"no file in {folder} has the flow's {name}; taken to be flow.pt")
    return "flow"


def _same(torch: Any, one: Any, other: Any) -> bool:
    both = one is not None and other is not None and one.shape == other.shape
    return both and bool(torch.equal(one.cpu().float(), other.float()))


def add_hift(case: Recording, calls: dict[str, list[Call]]) -> None:
    """Mel, source and wave of the vocoder's last call, and its pitch where that was seen."""
    call = calls["hift"][-1]
    mel, results = call.first("speech_feat", "mel", "x"), _results(call)
    if len(calls["hift"]) > 1:
        case.notes.append(f"the vocoder was called {len(calls['hift'])} times; the last is kept")
    if mel is None or len(results) < 2:
        case.notes.append("the vocoder's mel or its source (second result) was not found")
        return
    case.tensors = {
        "mel": plain(mel),
        "wave": plain(results[0]).flatten(),
        "source": plain(results[1]).flatten(),
    }
    if calls["f0"]:
        case.tensors["f0"] = plain(_results(calls["f0"][-1])[0]).flatten()
