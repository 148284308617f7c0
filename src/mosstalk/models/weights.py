"""Reading weights strictly: every tensor named, shaped, finite and used exactly once."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn

from mosstalk.errors import CheckpointError
from mosstalk.files import read_json
from mosstalk.progress import Progress

_NAMED_IN_MESSAGE = 3
_Item = TypeVar("_Item")
_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
}
_SCALE = "|scale"
"""After the name of a matrix in 8 bits: its scales."""
_SMALLEST = 2.0**-24
"""The smallest float16 above 0, so that outputs that are all 0 stay so."""
_STEPS, _MATRIX = 127, 2
_PACKED = ".xz"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: its shape, where it lies, a function that reads it, its dtype.

    ``load_rows`` reads rows [a, b) alone, where the file allows it.
    """

    shape: tuple[int, ...]
    where: str
    load: Callable[[], Tensor]
    dtype: str = "float32"
    load_rows: Callable[[int, int], Tensor] | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Rows [start, end) of the tensor."""
        return self.load_rows(start, end) if self.load_rows else self.load()[start:end].clone()

    def part(self, start: int, shape: tuple[int, ...]) -> "StoredTensor":
        """A tensor of ``shape`` whose rows are those from ``start`` on; no others are read."""
        end = start + shape[0]
        return StoredTensor(
            shape,
            self.where,
            lambda: self.rows(start, end),
            self.dtype,
            lambda first, last: self.rows(start + first, start + last),
        )


Store = dict[str, StoredTensor]


def open_safetensors(path: Path) -> Store:
    """List the tensors of one safetensors file without reading them.

    One that ``xz`` has packed, see ``stored_at``, is unpacked in memory, whole.

    Raises:
        CheckpointError: missing, truncated, or no safetensors file.
    """
    path = stored_at(path)
    with _readable(path):
        if path.suffix == _PACKED:
            return _in_memory(path, _unpacked(path))
        handle = safe_open(path, framework="pt")
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return _widened({
            name: StoredTensor(
                tuple(part.get_shape()),
                str(path),
                partial(handle.get_tensor, name),
                _DTYPE_NAMES.get(part.get_dtype(), part.get_dtype()),
                partial(_slice, part),
            )
            for name, part in slices.items()
        })  # fmt: skip


def stored_at(path: Path) -> Path:
    """Where a file lies: ``path``, or if only that is there, ``path`` with ``.xz`` after it."""
    packed = path.with_name(path.name + _PACKED)
    return packed if packed.exists() and not path.exists() else path


def _unpacked(path: Path) -> dict[str, Tensor]:
    try:
        import lzma
    except ImportError:
        raise CheckpointError(
            f"{path}: this Python was built without xz; unpack it yourself, xz -dk {path}"
        ) from None
    try:
        return load(lzma.decompress(path.read_bytes()))
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from None


def _in_memory(path: Path, values: Mapping[str, Tensor]) -> Store:
    store: Store = {}
    for name, value in values.items():
        dtype = str(value.dtype).removeprefix("torch.")
        store[name] = StoredTensor(tuple(value.shape), str(path), partial(_itself, value), dtype)
    return _widened(store)


def open_sharded(folder: Path) -> Store:
    """List the tensors of ``model.safetensors``, or of the shards that its index names.

    Raises:
        CheckpointError: no weights, a shard is missing or damaged, or index and shards
            disagree.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return open_safetensors(folder / "model.safetensors")
    weight_map = _weight_map(index)
    store: Store = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in open_safetensors(folder / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{index}: does not place {name}, which lies in {shard}")
            store[name] = tensor
    lost = sorted(set(weight_map) - set(store))
    if lost:
        raise CheckpointError(f"{folder}: {_some(lost)} not in the shards the index names")
    return store


def to_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices (n, ...) in int8, a float16 scale (n, 1, ...) beside each; vectors as they are.

    They take half of float16's bytes on disk. ``open_safetensors`` and ``open_pickled`` give the
    matrices back in float16, under their own names and without the scales.
    """
    stored = {}
    for name, value in weights.items():
        stored[name] = value
        if value.ndim >= _MATRIX:
            scale = value.abs().amax(tuple(range(1, value.ndim)), keepdim=True).half()
            stored[name + _SCALE] = scale = scale.clamp_min(_SMALLEST)
            steps = (value.float() / scale.float() * _STEPS).round()
            stored[name] = steps.clamp(-_STEPS, _STEPS).to(torch.int8)
    return stored


def from_int8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """float32 weights of what ``to_int8`` made; those that have no scale beside them are kept."""
    return {
        name: _wide(value, stored[name + _SCALE]) if name + _SCALE in stored else value.float()
        for name, value in stored.items()
        if not name.endswith(_SCALE)
    }


def _wide(value: Tensor, scale: Tensor) -> Tensor:
    return value.float() / _STEPS * scale.float()


def _widened(store: Store) -> Store:
    """The tensors of a file, those that ``to_int8`` made small in float16 again."""
    return {
        name: _as_float16(stored, store[name + _SCALE]) if name + _SCALE in store else stored
        for name, stored in store.items()
        if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in store)
    }


def _as_float16(stored: StoredTensor, scale: StoredTensor) -> StoredTensor:
    """A matrix of ``to_int8`` and its scale as one tensor in float16."""
    return StoredTensor(
        stored.shape,
        stored.where,
        lambda: _wide(stored.load(), scale.load()).half(),
        "float16",
        lambda start, end: _wide(stored.rows(start, end), scale.rows(start, end)).half(),
    )


def _itself(value: Tensor) -> Tensor:
    return value


def _slice(part: Any, start: int, end: int) -> Tensor:
    rows: Tensor = part[start:end]
    return rows


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: no readable weight_map; fetch it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", "..") or Path(shard).name != shard:
            raise CheckpointError(f"{index}: {name} lies outside the folder: {shard!r}")
    return weight_map


def open_pickled(path: Path, part: str | None = None) -> Store:
    """List the tensors of a plain state dict in a ``.pt`` file; no code in it is run.

    The training counters ``epoch`` and ``step`` are dropped, nothing else. ``part`` names the
    state dict in a file that holds several.
    """
    with _readable(path):
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if part is not None:
        values = values.get(part) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds no state dict")
    kept = {name: value for name, value in values.items() if name not in ("epoch", "step")}
    for name, value in kept.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is no tensor; this is no plain state dict")
    return _in_memory(path, kept)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete, fetch it")
    try:
        yield
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: not a plain state dict of tensors, or damaged; code in it is not run. "
            "Fetch it again"
        ) from None
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(
            f"{path}: damaged or truncated, or not a weights file ({reason[:120]}); fetch it again"
        ) from None


def fold_weight_norm(store: Store) -> Store:
    """Replace weight-normalised pairs by the weight w = g v / ||v|| (Salimans & Kingma 2016).

    The norm runs over all dimensions but the first. Both published spellings are read:
    ``parametrizations.weight.original{0,1}`` and ``weight_{g,v}``.
    """
    spellings = (
        (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
        (".weight_g", ".weight_v"),
    )
    folded = dict(store)
    for g_end, v_end in spellings:
        for name in [name for name in store if name.endswith(g_end)]:
            stem = name.removesuffix(g_end)
            if stem + v_end not in store:
                continue
            g, v = folded.pop(name), folded.pop(stem + v_end)
            folded[f"{stem}.weight"] = StoredTensor(v.shape, v.where, _weight_norm(g, v))
    return folded


def _weight_norm(g: StoredTensor, v: StoredTensor) -> Callable[[], Tensor]:
    def load() -> Tensor:
        direction = v.load().float()
        norm = direction.flatten(1).norm(dim=1).reshape(-1, *[1] * (direction.ndim - 1))
        return g.load().float() * direction / norm

    return load


def fill(
    module: nn.Module,
    store: Mapping[str, StoredTensor],
    *,
    where: str,
    device: torch.device,
    dtype: torch.dtype,
    own: Mapping[str, torch.dtype] | None = None,
    unused: Callable[[str], bool] = lambda _: False,
    progress: Progress | None = None,
) -> None:
    """Give a module made on the meta device its weights, each tensor of ``store`` once.

    All become ``dtype`` but those for which ``own`` has another. Names for which ``unused`` is
    true may be present and are left alone.

    Raises:
        CheckpointError: missing, unexpected or misshapen tensors (by name), NaN or
            infinity, or values that overflow ``dtype``.
    """
    expected = shapes_of(module)
    check_inventory(expected, store, where, unused)
    loaded: dict[str, Tensor] = {}
    for done, name in enumerate(expected):
        if progress:
            progress(f"loading {where}", done, len(expected))
        loaded[name] = _read(name, store[name], device, (own or {}).get(name, dtype))
    module.load_state_dict(loaded, strict=True, assign=True)
    module.requires_grad_(False)
    module.eval()


def in_shards(
    items: Iterable[_Item], bytes_of: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """``items`` in order, in lists of at most ``most`` bytes each; a larger one stands alone."""
    shard, size = list[_Item](), 0
    for item in items:
        new = bytes_of(item)
        if shard and size + new > most:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += new
    yield shard


def shard_name(number: int, count: int) -> str:
    """The published name of shard ``number``, from 1, of ``count``."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a module's tensors."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def check_inventory(
    expected: Mapping[str, tuple[int, ...]],
    store: Mapping[str, StoredTensor],
    where: str,
    unused: Callable[[str], bool] = lambda _: False,
) -> None:
    """Raise CheckpointError naming what is missing, unexpected or misshapen."""
    missing = [name for name in expected if name not in store]
    extra = [name for name in store if name not in expected and not unused(name)]
    wrong = [
        f"{name} is {list(store[name].shape)}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in store and store[name].shape != shape
    ]
    problems = [
        f"{len(names)} tensor{'s'[: len(names) > 1]} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("misshapen", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{where}: {'; '.join(problems)}. The weights do not fit their config: "
            "fetch both again from one place"
        )


def _read(name: str, stored: StoredTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    try:
        value = stored.load()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{stored.where}: {name} cannot be read ({error})") from None
    if not value.is_floating_point():
        raise CheckpointError(f"{stored.where}: {name} is {value.dtype}, not floating point")
    on_device = value.to(device)
    converted = on_device.to(dtype)
    if not _all_finite(converted):
        if not _all_finite(on_device):
            raise CheckpointError(f"{stored.where}: {name} holds NaN or infinity; fetch it again")
        raise CheckpointError(
            f"{stored.where}: {name} overflows {dtype}; choose --dtype bfloat16 or float32"
        )
    return converted


def embedding(count: int, width: int) -> nn.Embedding:
    """``nn.Embedding``, but for one thing: on the meta device its weight is not drawn.

    There torch would draw it by a reference that imports its compiler, which takes 2 s.
    """
    weight = torch.empty(count, width)
    if not weight.is_meta:
        nn.init.normal_(weight)
    return nn.Embedding.from_pretrained(weight, freeze=False)


def _all_finite(value: Tensor) -> bool:
    if value.dtype == torch.float8_e4m3fn:
        # torch cannot say. This format has no infinity, and NaN in all bits but the sign.
        return not bool(((value.view(torch.uint8) & 0x7F) == 0x7F).any())
    if bool(torch.isfinite(value.sum(dtype=torch.float32))):
        return True  # most often: a sum is finite only if all are, and takes less time
    return bool(torch.isfinite(value).all())


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:_NAMED_IN_MESSAGE])
    more = len(listed) - _NAMED_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
