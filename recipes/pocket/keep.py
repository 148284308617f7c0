"""The stages keep and unkeep: codes, labels and texts in one small file, without sound.

A language model can be trained again from them. The file is NumPy's npz, compressed with xz:
``tables``, json of every shard's name and its table as text; ``labels``, uint8 (4 * codes,) of all
shards in this order; ``hearings``; ``bits`` of one code, as many as the largest needs; ``codes-0``,
packed codes of the first hearing, which is clean; and for each further one ``where-1``, a bit per
code that says where it differs from the first, and ``codes-1``, the packed codes there.
"""

import io
import json
import lzma
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from mosstalk.constants import MEL_FRAMES_PER_CODE, codes_in
from mosstalk.files import write_whole
from recipes.pocket.data import load_recordings

_Array = NDArray[Any]
_DAMAGES = (lzma.LZMAError, zipfile.BadZipFile, EOFError, LookupError, TypeError, ValueError)
"""What decoding raises; xz has a check sum of all that it holds."""


class KeptError(ValueError):
    """Shards that cannot be kept, or a kept file that cannot be written out."""


def keep(work: Path, parts: Iterable[int], out: Path, hearings: int | None = None) -> int:
    """Write the encoded shards of ``parts`` to ``out``; return its size in bytes.

    Of each shard the first ``hearings`` are kept, by default as many as the first shard has.
    Raises FileNotFoundError where there is no shard or one is not encoded, and KeptError where
    codes or labels do not fit a shard's table.
    """
    shards = load_recordings(work / "data", torch.device("cpu"), parts, sound=()).shards
    tables, labels, codes = dict[str, str](), list[_Array](), list[_Array]()
    for name, count in shards.items():
        stem = work / "data" / name
        tables[name] = stem.with_suffix(".json").read_bytes().decode()
        frames, wanted = np.load(stem.with_suffix(".labels.npy")), (count * MEL_FRAMES_PER_CODE,)
        labels.append(_fitting(frames, np.uint8, wanted, f"labels of {name}"))
        found = np.load(work / "codes" / f"{name}.npy")
        hearings = hearings or len(found)
        codes.append(_fitting(found[:hearings], np.int16, (hearings, count), f"codes of {name}"))
    arrays = _pack_hearings(np.concatenate(codes, axis=1).view(np.uint16))
    arrays["tables"] = np.frombuffer(json.dumps(tables).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, labels=np.concatenate(labels), **arrays)
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = lzma.compress(file.getvalue(), preset=6)
    write_whole(out, kept)
    return len(kept)


def unkeep(work: Path, kept: Path) -> dict[str, int]:
    """Write the shards of a kept file as they were, to the bit; return how many codes each has.

    Raises FileNotFoundError where there is no such file, and KeptError where it is damaged or of
    another kind, or where ``work`` has a file of one of its shards. Then nothing is written.
    """
    try:
        arrays = np.load(io.BytesIO(lzma.decompress(kept.read_bytes())))
        tables: dict[str, str] = json.loads(arrays["tables"].tobytes())
        rows = {name: json.loads(table) for name, table in tables.items()}
        shards = {name: sum(codes_in(row["length"]) for row in rows[name]) for name in rows}
        if not all(re.fullmatch(r"[\w-]+", name) for name in shards):
            raise ValueError("a shard's name leads elsewhere")
        total = sum(shards.values())
        codes = _unpack_hearings(arrays, total).view(np.int16)
        labels = _fitting(arrays["labels"], np.uint8, (total * MEL_FRAMES_PER_CODE,), "labels")
    except _DAMAGES as error:
        raise KeptError(f"{kept}: damaged, or no file that keep wrote") from error
    for folder in (work / "data", work / "codes"):
        taken = sorted(path for path in folder.glob("*") if path.name.split(".")[0] in shards)
        if taken:
            raise KeptError(f"{taken[0]}: is there already; name another folder")
    for folder in (work / "data", work / "codes"):
        folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(list(shards.values()))[:-1]
    pieces = np.split(codes, ends, axis=1), np.split(labels, ends * MEL_FRAMES_PER_CODE)
    for (name, table), of_codes, of_frames in zip(tables.items(), *pieces, strict=True):
        np.save(work / "codes" / f"{name}.npy", of_codes)
        np.save(work / "data" / f"{name}.labels.npy", of_frames)
        (work / "data" / f"{name}.json").write_bytes(table.encode())
    return shards


def _fitting(found: _Array, kind: DTypeLike, shape: tuple[int, ...], name: str) -> _Array:
    if found.dtype != kind or found.shape != shape:
        has, needed = f"{found.dtype} {found.shape}", f"{np.dtype(kind)} {shape}"
        raise KeptError(f"{name} are {has}, but {needed} is needed")
    return found


def _pack_hearings(codes: NDArray[np.uint16]) -> dict[str, Any]:
    """The arrays of codes (hearings, codes)."""
    bits = int(codes.max()).bit_length()
    arrays = {"hearings": len(codes), "bits": bits, "codes-0": _pack(codes[0], bits)}
    for number, hearing in enumerate(codes[1:], 1):
        where = hearing != codes[0]
        arrays[f"where-{number}"] = np.packbits(where)
        arrays[f"codes-{number}"] = _pack(hearing[where], bits)
    return arrays


def _unpack_hearings(arrays: dict[str, _Array], count: int) -> NDArray[np.uint16]:
    """What was packed, (hearings, count)."""
    bits = int(arrays["bits"])
    out = np.tile(_unpack(arrays["codes-0"], bits, count), (int(arrays["hearings"]), 1))
    for number, hearing in enumerate(out[1:], 1):
        where = np.unpackbits(arrays[f"where-{number}"], count=count).astype(bool)
        hearing[where] = _unpack(arrays[f"codes-{number}"], bits, int(where.sum()))
    return out


def _pack(values: NDArray[np.uint16], bits: int) -> NDArray[np.uint8]:
    """The last ``bits`` bits of each value, one after another."""
    every = np.unpackbits(values.astype(">u2").view(np.uint8)).reshape(-1, 16)
    return np.packbits(every[:, 16 - bits :])


def _unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint16]:
    every = np.zeros((count, 16), np.uint8)
    every[:, 16 - bits :] = np.unpackbits(packed, count=bits * count).reshape(count, bits)
    return np.packbits(every).view(">u2").astype(np.uint16)
