"""What ``deploy/`` says, done: an image's steps on a bare Debian root, the compose files read."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import ROOT, require_program
from server_rig import free_port

DEPLOY = ROOT / "deploy"
MIRROR = "http://deb.debian.org/debian"
ANSWER_S = 300.0
_STEP = re.compile(r"^([A-Z]+) (.+)$", re.MULTILINE)


def steps_of(dockerfile: Path) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile, in order; each is one line."""
    return _STEP.findall(dockerfile.read_text())


def pip_paths() -> list[str]:
    """Files and folders of this machine that pip's settings name."""
    done = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True)
    words = set(re.findall(r"/[^\s':]+", done.stdout.replace("file://", " ")))
    return sorted((word for word in words if Path(word).exists()), key=len, reverse=True)


class BareRoot:
    """A bare Debian in a folder, in which an image's steps are carried out as Docker does.

    What is mounted there is so for the commands that run in it alone.
    """

    def __init__(self, root: Path, suite: str) -> None:
        self.root = root
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.user = "root"
        self.folder = "/"
        words = [require_program("debootstrap"), "--variant=minbase", suite, str(root), MIRROR]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        for name in ("/etc/resolv.conf", "/etc/hosts"):
            shutil.copy(name, root / name[1:])
        # How this machine reaches packages is no part of an image.
        self._mounts = [f"mount -t proc proc {root}/proc", f"mount -t tmpfs tmpfs {root}/dev/shm"]
        settings = Path("/etc/pip.conf").read_text() if Path("/etc/pip.conf").exists() else ""
        self._outside = {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
        for number, path in enumerate(pip_paths()):
            place = f"/outside-{number}"
            (root / place[1:]).mkdir() if Path(path).is_dir() else (root / place[1:]).touch()
            self._mounts.append(f"mount --bind {path} {root}{place}")
            settings = settings.replace(path, place)
            self._outside |= {
                name: value.replace(path, place) for name, value in self._outside.items()
            }
        (root / "etc" / "pip.conf").write_text(settings)

    def command(self, *words: str) -> list[str]:
        """What runs words in there."""
        given = [f"{name}={value}" for name, value in self.environment.items()]
        if self.user == "root":
            given += [f"{name}={value}" for name, value in self._outside.items()]
        inside = ["env", "-i", *given, "sh", "-c", f"cd {self.folder} && exec {shlex.join(words)}"]
        chroot = ["chroot", f"--userspec={self.user}:{self.user}", str(self.root), *inside]
        script = "; ".join([*self._mounts, f"exec {shlex.join(chroot)}"])
        return ["unshare", "--mount", "sh", "-ec", script]

    def run(self, *words: str) -> str:
        """Run words in there to their end; what they printed."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    def copy_in(self, place: str) -> None:
        """What ``COPY . place`` does: the tracked files that the ignore file lets through."""
        ignored = (DEPLOY / "Dockerfile.dockerignore").read_text()
        kept = re.findall(r"^!(.+)$", ignored, re.MULTILINE)
        words = ["git", "ls-files", "-z", "--", *kept]
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            target = self.root / place[1:] / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[BareRoot]:
    """A bare Debian of the release that the Dockerfile begins with."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make and enter a bare system")
    image = dict(steps_of(DEPLOY / "Dockerfile"))["FROM"]
    suite = re.fullmatch(r"debian:(\w+)-slim", image)
    assert suite, image
    root = tmp_path / "root"
    yield BareRoot(root, suite.group(1))
    shutil.rmtree(root)


@pytest.mark.system
@pytest.mark.slow  # a bare system and 500 MB of packages are fetched
@pytest.mark.timeout(1800)
def test_the_steps_of_the_image_end_in_a_server_that_answers(bare: BareRoot) -> None:
    port = free_port()
    arguments, served = {"DEVICE": "cpu"}, {}
    for step, words in steps_of(DEPLOY / "Dockerfile"):
        match step:
            case "ARG":
                assert words in [f"{name}={value}" for name, value in arguments.items()]
            case "COPY":
                bare.copy_in(words.split()[1])
            case "RUN":
                text = re.sub(r"\$(\w+)", lambda name: arguments[name.group(1)], words)
                bare.run(*shlex.split(text))
            case "ENV":
                name, _, value = words.partition("=")
                bare.environment[name] = value.replace("$PATH", bare.environment["PATH"])
            case "USER":
                bare.user = words
            case "WORKDIR":
                bare.folder = words
            case "HEALTHCHECK" | "ENTRYPOINT":
                served[step] = json.loads(words[words.index("[") :])
            case _:
                assert step in ("FROM", "VOLUME", "EXPOSE"), f"{step}: nothing is known of it here"

    checked = [word.replace(":8000/", f":{port}/") for word in served["HEALTHCHECK"]]
    with subprocess.Popen(
        bare.command(*served["ENTRYPOINT"], "--port", str(port)),
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout
            assert any(line.startswith("ready: ") for line in server.stdout)
            said = httpx.post(
                f"http://localhost:{port}/v1/chat/completions",
                json={
                    "model": "any",
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                },
                timeout=ANSWER_S,
            )
            assert "Paris" in said.json()["choices"][0]["message"]["content"], said.text
            bare.run(*checked)
            server.send_signal(signal.SIGTERM)
            assert server.wait(90) == 0
            with pytest.raises(AssertionError):  # nobody is there to be well
                bare.run(*checked)
        finally:
            server.kill()


@pytest.mark.system
@pytest.mark.parametrize("more", [(), ("compose.cuda.yaml",)], ids=["cpu", "cuda"])
def test_the_compose_files_are_read(more: tuple[str, ...]) -> None:
    program = require_program("docker-compose")
    files = [word for name in ("compose.yaml", *more) for word in ("-f", str(DEPLOY / name))]
    done = subprocess.run([program, *files, "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("driver: nvidia" in done.stdout) == bool(more)
