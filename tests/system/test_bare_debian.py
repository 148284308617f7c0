"""What ``deploy/`` says, done on a bare Debian: an image's steps, and the unit under systemd."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from conftest import ROOT, require_program
from server_rig import POLL_S, free_port

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

    def command(self, *words: str, user: str = "", sealed: bool = False) -> list[str]:
        """What runs words in there, as the image's user unless another is named.

        ``sealed``: nothing can be written but in /tmp and in the image's folder, as compose.yaml
        has it.
        """
        user, mounts = user or self.user, self._mounts
        if sealed:
            root, own = self.root, f"{self.root}{self.folder}"
            mounts = [
                f"mount --bind {root} {root}",
                f"mount --bind {own} {own}",
                f"mount -t tmpfs tmpfs {root}/tmp",
                f"mount -o remount,bind,ro {root}",
                *mounts,
            ]
        given = [f"{name}={value}" for name, value in self.environment.items()]
        if user == "root":
            given += [f"{name}={value}" for name, value in self._outside.items()]
        inside = ["env", "-i", *given, "sh", "-c", f"cd {self.folder} && exec {shlex.join(words)}"]
        chroot = ["chroot", f"--userspec={user}:{user}", str(self.root), *inside]
        script = "; ".join([*mounts, f"exec {shlex.join(chroot)}"])
        return ["unshare", "--mount", "sh", "-ec", script]

    def run(self, *words: str, user: str = "", sealed: bool = False) -> str:
        """Run words in there to their end; what they printed."""
        command = self.command(*words, user=user, sealed=sealed)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
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


class Image(BareRoot):
    """What the Dockerfile makes; ``entry`` starts the server, ``check`` asks it how it is."""

    entry: list[str]
    check: list[str]

    def build(self, arguments: dict[str, str]) -> None:
        """Carry out the steps of the Dockerfile."""
        for step, words in steps_of(DEPLOY / "Dockerfile"):
            match step:
                case "ARG":
                    assert words.partition("=")[0] in arguments
                case "COPY":
                    self.copy_in(words.split()[1])
                case "RUN":
                    text = re.sub(r"\$(\w+)", lambda name: arguments[name.group(1)], words)
                    self.run(*shlex.split(text))
                case "ENV":
                    name, _, value = words.partition("=")
                    self.environment[name] = value.replace("$PATH", self.environment["PATH"])
                case "USER":
                    self.user = words
                case "WORKDIR":
                    self.folder = words
                case "HEALTHCHECK":
                    self.check = json.loads(words[words.index("[") :])
                case "ENTRYPOINT":
                    self.entry = json.loads(words)
                case _:
                    assert step in ("FROM", "VOLUME", "EXPOSE"), f"{step}: no test does this"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """An image for a CPU, of the Debian that the Dockerfile begins with."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make and enter a bare system")
    name = dict(steps_of(DEPLOY / "Dockerfile"))["FROM"]
    suite = re.fullmatch(r"debian:(\w+)-slim", name)
    assert suite, name
    root = tmp_path_factory.mktemp("bare") / "root"
    made = Image(root, suite.group(1))
    made.build({"DEVICE": "cpu"})
    yield made
    shutil.rmtree(root)


def ask_for_the_capital(port: int) -> str:
    """What a server answers."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json={"model": "any", "messages": messages},
        timeout=ANSWER_S,
    )
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.bare  # a bare system and 500 MB of packages are fetched
@pytest.mark.timeout(1800)
def test_the_steps_of_the_image_end_in_a_server_that_answers(image: Image) -> None:
    port = free_port()
    check = [word.replace(":8000/", f":{port}/") for word in image.check]
    with pytest.raises(AssertionError, match="Read-only file system"):
        image.run("touch", "/opt/mosstalk/file", user="root", sealed=True)
    command = image.command(*image.entry, "--port", str(port), sealed=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            assert any(line.startswith("ready: ") for line in server.stdout)
            assert "Paris" in ask_for_the_capital(port)
            image.run(*check)
            owner = Path(f"/proc/{server.pid}").stat().st_uid
            assert owner == 10001
            server.send_signal(signal.SIGTERM)
            assert server.wait(90) == 0
            with pytest.raises(AssertionError):  # nobody is there to be well
                image.run(*check)
        finally:
            server.kill()


class Machine:
    """A bare Debian that has booted, with systemd as its first process."""

    def __init__(self, root: Path) -> None:
        words = [require_program("systemd-nspawn"), "--boot", "--register=no", "--keep-unit"]
        self._log = (root.parent / "boot.log").open("w")
        self.process = subprocess.Popen(
            [*words, "--directory", str(root)],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def stop(self) -> int:
        """Shut it down in order; the exit code."""
        self.process.terminate()
        code = self.process.wait(120)
        self._log.close()
        return code

    def await_ready(self, port: int) -> None:
        """Wait until a server there lets clients in."""
        end_s = time.monotonic() + ANSWER_S
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    return
            assert self.process.poll() is None, Path(self._log.name).read_text()[-3000:]
            assert time.monotonic() < end_s, Path(self._log.name).read_text()[-3000:]
            time.sleep(POLL_S)

    def run(self, *words: str) -> str:
        """Run words in it, as root; what they printed."""
        first = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        inside = ["nsenter", "--all", "--target", first.split()[0], *words]
        return subprocess.run(inside, capture_output=True, text=True, check=True).stdout

    def await_log(self, line: str) -> None:
        """Wait until its journal has such a line."""
        end_s = time.monotonic() + ANSWER_S
        while line not in self.run("journalctl", "--boot", "--output=cat", "--no-pager"):
            assert time.monotonic() < end_s, line
            time.sleep(POLL_S * 10)

    def child(self, part: bytes) -> int:
        """The process of the machine whose command line has this part, as seen from outside."""
        found, queue = [], [self.process.pid]
        while queue:
            number = queue.pop()
            with suppress(OSError):  # it has ended
                queue += map(
                    int, Path(f"/proc/{number}/task/{number}/children").read_text().split()
                )
                if part in Path(f"/proc/{number}/cmdline").read_bytes():
                    found.append(number)
        assert found, part
        return min(found)


def enable(image: Image, unit: str, port: int) -> None:
    """Have systemd start this unit of ``deploy/``, and no other one of them, at its next boot."""
    packages = "systemd systemd-sysv dbus"
    install = f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {packages}"
    image.run("sh", "-c", install, user="root")
    units, settings = (image.root / "etc" / name for name in ("systemd/system", "mosstalk"))
    shutil.copy(DEPLOY / unit, units)
    wanted = units / "multi-user.target.wants"
    for folder in (wanted, settings, image.root / "var" / "log" / "journal"):
        folder.mkdir(exist_ok=True)
    for other in wanted.glob("mosstalk*"):
        other.unlink()
    (wanted / unit).symlink_to(f"/etc/systemd/system/{unit}")
    options = (DEPLOY / "mosstalk.env").read_text()
    (settings / "mosstalk.env").write_text(options.replace("--port 8000", f"--port {port}"))


def journal_of(image: Image, unit: str) -> str:
    """What a machine that has ended wrote down of a unit."""
    words = ["journalctl", "-D", "/var/log/journal", "-u", unit, "-o", "cat", "--no-pager"]
    return image.run(*words, user="root")


def check_rights(pid: int) -> None:
    """A unit's process is not root, and can do little."""
    status = Path(f"/proc/{pid}/status").read_text()
    for line in ("NoNewPrivs:\t1", "Seccomp:\t2", "CapBnd:\t0000000000000000"):
        assert line in status
    assert Path(f"/proc/{pid}").stat().st_uid != 0


def check_restart(machine: Machine, port: int, command: bytes, killed: bytes) -> None:
    """Kill a process on which ``command`` depends: it ends, and systemd starts another one."""
    before = machine.child(command)
    os.kill(machine.child(killed), signal.SIGKILL)
    while Path(f"/proc/{before}").exists():
        time.sleep(POLL_S)
    machine.await_ready(port)
    assert machine.child(command) != before


@pytest.mark.bare  # a bare system and 500 MB of packages are fetched
@pytest.mark.timeout(1800)
def test_systemd_runs_the_unit_and_starts_it_again(image: Image) -> None:
    port = free_port()
    enable(image, "mosstalk.service", port)
    machine = Machine(image.root)
    try:
        machine.await_ready(port)
        assert "Paris" in ask_for_the_capital(port)
        check_rights(machine.child(b"mosstalk\0serve"))
        check_restart(machine, port, b"mosstalk\0serve", killed=b"mosstalk.server.worker")
    finally:
        code = machine.stop()
    assert code == 0
    journal = journal_of(image, "mosstalk")
    assert "code=exited, status=70" in journal
    assert '"message": "draining for up to 30 s' in journal
    assert journal.count("mosstalk.service: Deactivated successfully.") == 1


@pytest.mark.bare  # Ray is fetched as well
@pytest.mark.timeout(1800)
def test_systemd_runs_a_fleet_upgrades_it_and_starts_it_again(image: Image) -> None:
    port = free_port()
    enable(image, "mosstalk-fleet.service", port)
    bootstrap = "/opt/mosstalk/scripts/bootstrap.py"
    image.run("python3", bootstrap, "--extras", "fleet,redis", user="root")
    served = "serve: {vad: none, transcriber: none, temperature: 0, seed: 0}"
    file = f"port: {port}\nreplicas: 1\ncpus: 0.5\n{served}\n"
    (image.root / "etc" / "mosstalk" / "fleet.yaml").write_text(file)

    machine = Machine(image.root)
    try:
        machine.await_ready(port)
        assert "Paris" in ask_for_the_capital(port)
        check_rights(machine.child(b"mosstalk\0fleet"))
        machine.run("systemctl", "reload", "mosstalk-fleet")
        machine.await_log("upgraded: every replica is new")
        check_restart(machine, port, b"mosstalk\0fleet", killed=b"/gcs_server\0")
    finally:
        code = machine.stop()
    assert code == 0
    journal = journal_of(image, "mosstalk-fleet")
    assert "code=exited, status=70" in journal
    assert "ending: replies that are being made have 30 s" in journal
    assert journal.count("mosstalk-fleet.service: Deactivated successfully.") == 1


@pytest.mark.system
@pytest.mark.parametrize("more", [(), ("compose.cuda.yaml",)], ids=["cpu", "cuda"])
def test_the_compose_files_are_read(more: tuple[str, ...]) -> None:
    program = require_program("docker-compose")
    files = [word for name in ("compose.yaml", *more) for word in ("-f", str(DEPLOY / name))]
    done = subprocess.run([program, *files, "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("driver: nvidia" in done.stdout) == bool(more)
