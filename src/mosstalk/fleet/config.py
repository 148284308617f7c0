"""What a fleet is, as its YAML file says: how many replicas, on what, and each one's options."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from mosstalk.cli.serve import Serve
from mosstalk.errors import ConfigError
from mosstalk.prepared.default_models import NAMES

if TYPE_CHECKING:
    from mosstalk.server.admission import ServeOptions

_OF_THE_FLEET = {
    "host": "write it outside of serve: it is the fleet's",
    "port": "write it outside of serve: it is the fleet's",
    "front_processes": "a replica speaks with its clients in one process",
    "tls_cert": "a fleet speaks plain http: put a proxy with the certificate before it",
    "tls_key": "a fleet speaks plain http: put a proxy with the certificate before it",
    "tls_self_signed": "a fleet speaks plain http: put a proxy with a certificate before it",
    "print_config": "use mosstalk fleet FILE --print-config",
}
"""Options of ``mosstalk serve`` that a replica cannot have, and why."""
_STOP_S = 60
"""How much longer than the longest session an ingress process that was replaced may live."""
SETTINGS = {
    # Frames of sound go through HAProxy and past Serve's own proxy, which is written in Python.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mosstalk.fleet.replica:middlewares",
    # Who is refused by a full replica is sent to another one.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure 503",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # A replica that fails its checks has nothing to finish: its clients are told by its end.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Three failures in a row, and another HAProxy takes the place of one that has ended.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # By itself Ray gives HAProxy 5 s to begin, and ends it: on a busy machine it takes longer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # By itself Ray runs replicas at niceness 15: beside busy programs they would hardly ever run.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Environment variables that every process of Ray must have been started with."""
HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Autoscaling(_Strict):
    """As many replicas as its sessions need, between two bounds.

    Attributes:
        min, max: the bounds.
        used: the share of all places that is to be in use; above it a replica is added, and one
            is taken away where fewer would do.
        upscale_delay_s, downscale_delay_s: for how long that must be so first.
    """

    min: int = Field(default=1, ge=1)
    max: int = Field(ge=1)
    used: float = Field(default=0.7, gt=0, le=1)
    upscale_delay_s: float = Field(default=30.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max {self.max}: min must not be above max")
        return self


class FleetConfig(_Strict):
    """A fleet.

    Attributes:
        host, port: where clients come; other machines of the fleet reach its replicas with the
            host 0.0.0.0 alone.
        ray: the address of a Ray that runs, or auto for the one of this machine; None starts one
            on this machine alone.
        replicas: how many, or ``Autoscaling``.
        gpus, cpus: what a replica takes of its machine; ``gpus`` None is one where there are any.
        serve: options of ``mosstalk serve`` for each replica, by their names.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    ray: str | None = None
    replicas: Annotated[
        Annotated[int, Tag("int"), Field(ge=1)] | Annotated[Autoscaling, Tag("Autoscaling")],
        Discriminator(
            lambda it: "Autoscaling" if isinstance(it, (Mapping, Autoscaling)) else "int"
        ),
    ] = 1
    gpus: float | None = Field(default=None, ge=0)
    cpus: float = Field(default=1.0, ge=0)
    serve: dict[str, Any] = Field(default_factory=dict)
    _folder: Path = PrivateAttr(Path())

    @model_validator(mode="after")
    def _places(self) -> Self:
        if isinstance(self.replicas, Autoscaling) and not self.serve.get("max_sessions"):
            raise ValueError(
                "replicas that come and go need serve.max_sessions: places in use are a share of it"
            )
        return self

    @property
    def drain_s(self) -> float:
        """How long running replies of a replica that ends may take."""
        return self._command.drain_timeout

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that Ray must be started with for this fleet."""
        return SETTINGS | {HARD_STOP: str(int(self._command.max_session_s) + _STOP_S)}

    @property
    def target_sessions(self) -> int | None:
        """Sessions a replica, above which another one is added; None: their number is fixed."""
        if not isinstance(self.replicas, Autoscaling):
            return None
        return max(1, int((self._command.max_sessions or 0) * self.replicas.used))

    def within(self, folder: Path) -> Self:
        """With the folder that paths are relative to."""
        self._folder = folder.absolute()
        return self

    def options(self) -> dict[str, Any]:
        """The options for each replica, paths made absolute, as plain values."""
        command = asdict(self._command)
        return {
            name: str(command[name]) if isinstance(command[name], Path) else command[name]
            for name in self.serve
        }

    @property
    def _command(self) -> Serve:
        command = serve_command(self.serve)
        paths = {
            name: (self._folder / value).absolute()
            for name, value in asdict(command).items()
            if isinstance(value, Path) and str(value) not in NAMES
        }
        if (voice := self._folder / command.voice).is_file():
            paths["voice"] = str(voice.absolute())  # type: ignore[assignment]
        return replace(command, **paths)  # type: ignore[arg-type]


@cache
def _reader() -> TypeAdapter[Serve]:
    return TypeAdapter(Serve)


def serve_command(options: Mapping[str, Any]) -> Serve:
    """The command ``mosstalk serve`` with these options.

    Raises:
        ValidationError: one has a value of another type.
    """
    return _reader().validate_python(dict(options))


def serve_options(options: Mapping[str, Any]) -> "ServeOptions":
    """What they mean on this machine, for a replica.

    A client that comes back may come to another replica, which has not this one's memory: so it
    can where all have one store, and else it is given no token.

    Raises:
        ConfigError, OptionError: they mean nothing here.
    """
    from mosstalk.server.store import MEMORY

    served = serve_command(options).options()
    shared = served.store if served.store and served.store.url != MEMORY else None
    return replace(served, front_processes=0, store=shared)


def read_config(path: Path) -> FleetConfig:
    """The fleet that a YAML file describes.

    Raises:
        ConfigError: the file cannot be read, or a line of it means nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    try:
        node, given = yaml.compose(text), yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: is no YAML ({problem})") from None
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f"{path}:1: write NAME: VALUE lines, such as replicas: 2")
    if isinstance(options := given.get("serve"), dict):
        _check_names(options, path, node)
        given["serve"] = {_name_of(name): value for name, value in options.items()}
    try:
        config = FleetConfig.model_validate(given).within(path.parent)
    except ValidationError as error:
        raise _first_fault(error, path, node, FleetConfig.model_fields) from None
    try:
        serve_command(config.serve)
    except ValidationError as error:
        raise _first_fault(error, path, node, (), ("serve",)) from None
    return config


def _name_of(option: object) -> str:
    return str(option).removeprefix("--").replace("-", "_")


def _check_names(options: Mapping[Any, Any], path: Path, node: yaml.Node) -> None:
    known = Serve.__dataclass_fields__
    for given in options:
        name, where = _name_of(given), f"{path}:{_line(node, ('serve', given))}: serve.{given}"
        if name in _OF_THE_FLEET:
            raise ConfigError(f"{where} cannot be chosen for a replica; {_OF_THE_FLEET[name]}")
        if name not in known:
            raise ConfigError(
                f"{where} is no option of mosstalk serve{_like(name, known)}; "
                "mosstalk serve --help has them all"
            )


def _first_fault(
    error: ValidationError,
    path: Path,
    node: yaml.Node,
    known: Iterable[str],
    within: Sequence[str] = (),
) -> ConfigError:
    """The first thing that is wrong, with its line and what to do."""
    first = error.errors(include_url=False)[0]
    place = (*within, *(part for part in first["loc"] if part != "Autoscaling"))
    place = place[:1] if place[-1:] == ("int",) else place
    name, line = ".".join(map(str, place)), _line(node, place)
    where = f"{path}:{line}: {name}" if name else f"{path}"
    if first["type"] == "extra_forbidden":
        fields = Autoscaling.model_fields if place[0] == "replicas" else known
        return ConfigError(
            f"{where} is unknown{_like(str(place[-1]), fields)}; known are {', '.join(fields)}"
        )
    if first["type"] == "value_error":
        return ConfigError(f"{where}: {first['ctx']['error']}")
    return ConfigError(f"{where}: {first['msg']}, not {first['input']!r}")


def _like(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _line(node: yaml.Node, place: Sequence[Any]) -> int:
    """The line on which something stands, or what it would be within."""
    line = node.start_mark.line
    for part in place:
        if not isinstance(node, yaml.MappingNode):
            break
        found = [pair for pair in node.value if pair[0].value == str(part)]
        if not found:
            break
        line, node = found[-1][0].start_mark.line, found[-1][1]
    return line + 1
