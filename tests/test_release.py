"""What strangers download: the wheel, which speaks by itself, and the source archive, small."""

import fnmatch
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from contextlib import suppress
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from typing import cast

import pytest
import soundfile
from conftest import ROOT, command_environment, refused
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from server_rig import Server
from trove_classifiers import classifiers

from mosstalk.prepared.default_models import NO_WEIGHTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION: str = PROJECT["version"]
NOTICE = (ROOT / "NOTICE").read_text()
SDIST_BYTES = 10_000_000
TREE_BYTES = 62_000_000
FOR_DEVELOPERS = {"dev", "browser", "docs", "recipe"}
"""Extras that nobody needs who runs mosstalk."""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make dist` makes."""
    folder = tmp_path_factory.mktemp("dist")
    build = ["hatchling", "build", "--target", "sdist", "--target", "wheel", "--directory"]
    command = [sys.executable, "-m", *build, str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    return archives / f"mosstalk-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(archives: Path) -> Path:
    return archives / f"mosstalk-{VERSION}.tar.gz"


def tracked(*folders: str) -> set[str]:
    """What is in the repository, or would be after `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


# What they hold.


def test_a_clone_is_small() -> None:
    assert sum((ROOT / name).stat().st_size for name in tracked()) <= TREE_BYTES


def test_the_wheel_holds_the_package_with_its_weights_and_nothing_else(wheel: Path) -> None:
    info = f"mosstalk-{VERSION}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(info)}
        licences = [name for name in archive.namelist() if name.startswith(f"{info}licenses/")]
        for name in licences:
            assert archive.read(name) == (ROOT / name.partition("/licenses/")[2]).read_bytes()
    assert names == {name.removeprefix("src/") for name in tracked("src", "evals")}
    assert "mosstalk/pocket/model/model.safetensors" in names
    assert sorted(Path(name).name for name in licences) == ["LICENSE", "LICENSE.whisper", "NOTICE"]


def test_the_sdist_is_small_and_has_all_but_weights_and_goldens(sdist: Path) -> None:
    assert sdist.stat().st_size < SDIST_BYTES
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    left_out = ("src/mosstalk/pocket/model/", "src/mosstalk/pocket/codec/", "tests/goldens/")
    beside = (".ci/", ".github/", ".gitattributes")  # of use to who has the repository
    kept = {name for name in tracked() if not name.startswith((*left_out, *beside))}
    assert names == kept | {"PKG-INFO"}


def test_the_package_index_is_told_what_it_shows(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"mosstalk-{VERSION}.dist-info/METADATA").decode()
    told = Parser().parsestr(text)
    assert (told["Version"], told["License-Expression"]) == (VERSION, "Apache-2.0")
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload() == (ROOT / "README.md").read_text()
    assert len(told["Summary"]) < 120
    assert len(told["Keywords"].split(",")) == len(PROJECT["keywords"]) > 5
    assert set(PROJECT["classifiers"]) <= set(classifiers)
    assert (
        f"Programming Language :: Python :: {told['Requires-Python'].removeprefix('>=')}"
        in (PROJECT["classifiers"])
    )


# The version.


def test_the_version_is_written_in_one_place() -> None:
    written = rf"(mosstalk|version)[^[:alnum:]]{{1,6}}{re.escape(VERSION)}"
    # Documents of measurements and recordings say which version made them, and stay.
    searched = [".", ":!docs/figures", ":!tests/recordings"]
    command = ["git", "grep", "-lIiE", written, "--", *searched]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["pyproject.toml"]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", released[0])


# What it needs.


@pytest.mark.system  # `make test-all` has installed every extra
def test_every_version_in_constraints_runs_on_the_oldest_python() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    told, newer = 0, list[str]()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = line.partition("==")[0]
        with suppress(PackageNotFoundError):
            wanted = distribution(name).metadata["Requires-Python"]
            told += 1
            newer += [] if oldest in SpecifierSet(wanted or "") else [f"{line}: Python {wanted}"]
    assert told
    assert not newer


# Licences.


def stanzas() -> list[Message]:
    """The paragraphs of NOTICE that are fields, in order."""
    paragraphs = re.split(r"\n{2,}", NOTICE)
    return [
        Parser().parsestr(each.lstrip("\n"))
        for each in paragraphs
        if re.match(r"(Files|Package|License): ?", each)
    ]


def names_of(expression: str) -> set[str]:
    return set(expression.split(" and "))


def test_every_file_of_the_wheel_has_its_licence_there(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    covered = [stanza for stanza in stanzas() if "Files" in stanza]
    texts = {"Apache-2.0", "MIT"} | {
        stanza["License"].split("\n")[0] for stanza in stanzas() if stanza.keys() == ["License"]
    }
    for stanza in covered:
        assert names_of(stanza["License"]) <= texts, stanza["Files"]
        for pattern in stanza["Files"].split():
            assert fnmatch.filter(files, pattern), f"{pattern} is in no wheel"
    for file in files:
        assert any(
            fnmatch.fnmatchcase(file, pattern)
            for stanza in covered
            for pattern in stanza["Files"].split()
        ), f"{file}: NOTICE does not say whose it is"


PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|Zlib|CC0|BSL|Unlicense)\b", re.I
)
OTHER = re.compile(r"\b([AL]?GPL|MPL|EPL|CC-BY|Mozilla|Creative Commons|Proprietary|NVIDIA)", re.I)


def needed(wheel: Path, extras: set[str]) -> dict[str, Distribution]:
    """What is installed here of all that the wheel asks for with these extras."""
    itself = PathDistribution(zipfile.Path(wheel, f"mosstalk-{VERSION}.dist-info/"))
    found = {"mosstalk": cast("Distribution", itself)}
    waiting = [("mosstalk", frozenset(extras))]
    seen = set(waiting)
    while waiting:
        name, chosen = waiting.pop()
        for asked in map(Requirement, found[name].requires or ()):
            more = canonicalize_name(asked.name), frozenset(asked.extras)
            wanted = asked.marker is None or any(
                asked.marker.evaluate({"extra": extra}) for extra in ("", *chosen)
            )
            if wanted and more not in seen:
                with suppress(PackageNotFoundError):
                    found[more[0]] = found.get(more[0]) or distribution(asked.name)
                    waiting.append(more)
                seen.add(more)
    del found["mosstalk"]
    return found


def licence_of(package: Distribution) -> str:
    """Whatever its metadata says of its licence, in a line."""
    told = package.metadata
    kinds = [kind for kind in told.get_all("Classifier") or () if kind.startswith("License")]
    whole = [told["License-Expression"], (told["License"] or "").split("\n")[0], *kinds]
    return "; ".join(filter(None, whole))


def test_every_package_that_comes_beside_is_permissive_or_named(wheel: Path) -> None:
    named = " ".join(stanza["Package"] for stanza in stanzas() if "Package" in stanza).split()
    packages = needed(wheel, set(PROJECT["optional-dependencies"]) - FOR_DEVELOPERS)
    assert {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]} <= (
        packages.keys()
    )
    assert len(packages) > 60, "the set-up for tests brings so many"
    for name, package in packages.items():
        licence = licence_of(package)
        permissive = PERMISSIVE.search(licence) and not OTHER.search(licence)
        assert permissive or any(fnmatch.fnmatchcase(name, one) for one in named), (name, licence)


# Installed where nothing else is.


class Environment:
    """A virtual environment that holds an archive and some of the packages that are here.

    These are linked, so that nothing is downloaded: what an archive does not ask for is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mosstalk = folder / "bin" / "mosstalk"
        self.variables = command_environment(folder / "cache") | {"PYTHONPATH": ""}
        venv.create(folder, symlinks=True)
        (self.site,) = folder.glob("lib/python*/site-packages")

    def pip(self, *words: str | Path) -> None:
        quiet = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
        command = [sys.executable, "-m", "pip", "--python", self.folder, *words[:1], *quiet]
        done = subprocess.run(
            [*map(str, command), *map(str, words[1:])], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def link(self, packages: dict[str, Distribution]) -> None:
        for package in packages.values():
            for top in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
                if not (self.site / top).exists():
                    (self.site / top).symlink_to(Path(str(package.locate_file(top))))

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.mosstalk, *words], cwd=self.folder, env=self.variables,
            capture_output=True, text=True, check=False,
        )  # fmt: skip


# Slow: an environment is made, and a server started in it.
@pytest.mark.slow
def test_the_wheel_alone_speaks_and_serves(wheel: Path, tmp_path: Path) -> None:
    alone = Environment(tmp_path / "alone")
    alone.pip("install", wheel)
    alone.link(needed(wheel, set()))
    assert alone.run("--version").stdout == f"mosstalk {VERSION}\n"
    spoken = alone.run("speak", "hi", "--out", "hi.wav")
    assert spoken.returncode == 0, spoken.stderr
    assert soundfile.info(alone.folder / "hi.wav").duration > 0.2
    assert "pip install 'mosstalk[server]'" in refused(alone.run("serve"))

    alone.link(needed(wheel, {"server", "vad"}))
    server = Server(
        cache=alone.folder / "cache", env={"PYTHONPATH": ""}, program=[alone.mosstalk]
    )  # fmt: skip
    try:
        assert server.ready().get("/health").json()["version"] == VERSION
    finally:
        server.stop()


# Slow: an archive is built and installed as pip does it for a user.
@pytest.mark.slow
def test_what_is_installed_from_the_sdist_says_where_the_weights_are(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    bare = Environment(tmp_path / "bare")
    bare.link(needed(wheel, {"dev"}))  # with what builds it
    bare.pip("install", "--no-build-isolation", sdist)
    for words in (("speak", "hi"), ("serve", "--port", "0")):
        ran = bare.run(*words)
        assert ran.returncode == 2
        assert ran.stderr.splitlines()[-1] == f"error: {NO_WEIGHTS}"
