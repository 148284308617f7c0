"""``mosstalk fleet``: from a YAML file to many servers behind one address."""

import json
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.cli.command import fail
from mosstalk.cli.options import argument, option
from mosstalk.cli.serve import require_server
from mosstalk.environment import install_command

if TYPE_CHECKING:
    from mosstalk.fleet.config import FleetConfig

_HIDDEN = "not shown"
_PACKAGES = {"ray": "ray[serve]", "yaml": "pyyaml"}


@dataclass(frozen=True, eq=False, repr=False)
class Fleet:
    """Serve on several cards or machines behind one address, by Ray Serve.

    mosstalk fleet fleet.yaml

    The file says how many servers there are, each on a card of its own, and has options of
    mosstalk serve, which each of them is given:

    replicas: 2

    serve: {model: MOSS-Speech, codec: MOSS-Speech-Codec, max-sessions: 32}

    A connection goes to the server with the fewest, and stays there. One that finds no place
    anywhere is refused at once. A server that dies is started again. After SIGHUP the file is
    read again, and one server after the other is replaced. For one card there is mosstalk serve.

    Exit code 0: ended by a signal, running replies finished. 2: wrong input. 70: no server
    could be started. 130 or 143: a second signal.
    """

    config: Path = argument("The fleet's YAML file; docs/fleet.md has every line it may hold.")
    print_config: bool = option(False, "Print what the file means as json, and end.")
    environment: bool = option(
        False,
        "Print what Ray must be started with, on each machine, before ray start and serve run; "
        "and end. Not needed where ray: is left out.",
    )

    def run(self) -> int:
        """Serve as the file says, or print what it means; the exit code."""
        require_fleet(("yaml",))
        from mosstalk.fleet.config import read_config

        config = read_config(self.config)
        if self.environment:
            for name, value in config.settings.items():
                print(f"export {name}={shlex.quote(value)}")
            return 0
        if self.print_config:
            print(json.dumps(_document(config), indent=1, default=str))
            return 0
        require_fleet(_PACKAGES)
        from mosstalk.fleet.launch import launch

        return launch(lambda: read_config(self.config), lambda line: print(line, flush=True))


def _document(config: "FleetConfig") -> dict[str, object]:
    """What the file means; of secrets no more than that there are some, as ``serve`` prints."""
    options = config.options()
    if "api_key" in options:
        options["api_key"] = [_HIDDEN for _ in options["api_key"] or ()]
    if options.get("twilio_auth_token"):
        options["twilio_auth_token"] = _HIDDEN
    if options.get("store"):  # its address may hold a password
        options["store"] = options["store"].partition(":")[0]
    return config.model_dump() | {"serve": options, "environment": config.settings}


def require_fleet(modules: "dict[str, str] | tuple[str, ...]") -> None:
    """End with exit code 2 and a hint where a package that a fleet needs is not installed."""
    require_server("a fleet")
    missing = [_PACKAGES[name] for name in modules if find_spec(name) is None]
    if missing:
        fail(
            f"a fleet needs the extra fleet, of which {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; run: {install_command('fleet')}"
        )
