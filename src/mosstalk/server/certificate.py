"""A certificate and its key for TLS, from files or made here."""

import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosstalk.environment import cache_folder, install_command
from mosstalk.errors import OptionError, OutputError
from mosstalk.files import write_whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.x509 import Certificate

_VALID, _RENEWED_BEFORE = timedelta(days=397), timedelta(days=30)
"""Safari takes no server's certificate that lasts longer than 825 days, nor Chrome one of a public
authority beyond 398."""
_MOST_NAMES = 64
_LOCAL = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)
_FAR_AWAY = ("192.0.2.1", 9)
"""An address of nobody's (RFC 5737), to ask the kernel by which of its own it would be reached."""


@dataclass(frozen=True)
class Tls:
    """Files of a certificate and its key, in PEM.

    ``names``: host names and addresses that the certificate is for.
    """

    certificate: Path
    key: Path
    names: tuple[str, ...]
    self_signed: bool = False

    @property
    def host_names(self) -> frozenset[str]:
        """Those of ``names`` that are one host's, and no address."""
        return frozenset(n.lower() for n in self.names if _NAME.fullmatch(n) and not is_address(n))

    @property
    def host(self) -> str:
        """What to call this machine such that a client finds the certificate right."""
        names = self.host_names
        return "localhost" if not names or "localhost" in names else min(names)

    def context(self) -> ssl.SSLContext:
        """What speaks TLS with it.

        Raises:
            OptionError: OpenSSL takes the pair no more.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{self.certificate}, {self.key}: TLS cannot use this certificate with this key "
                f"({error}); make them anew"
            ) from None
        return context


def tls_of(
    certificate: Path | None, key: Path | None, self_signed: bool, names: Iterable[str]
) -> Tls | None:
    """What ``--tls-cert``, ``--tls-key`` and ``--tls-self-signed`` ask for; None without them.

    ``names`` are more for which a certificate is made.

    Raises:
        OptionError: files that cannot be used, or options that do not go together.
        OutputError: no certificate can be kept.
    """
    if not (certificate or key or self_signed):
        return None
    if find_spec("cryptography") is None:
        raise OptionError(
            "TLS needs the package cryptography, which the extra server brings; run: "
            f"{install_command('server')}"
        )
    if self_signed:
        if certificate or key:
            raise OptionError("give --tls-cert and --tls-key, or --tls-self-signed, not both")
        return _self_signed({*_own_names(), *filter(_can_be_certified, names)})
    if not (certificate and key):
        missing = "--tls-key" if certificate else "--tls-cert"
        raise OptionError(f"--tls-cert and --tls-key go together: give {missing} as well")
    return _given(certificate, key)


def own_addresses() -> list[str]:
    """IPv4 addresses by which other machines may reach this one.

    Those of IPv6 often change every day, and a certificate would with them.
    """
    found = list[str]()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_FAR_AWAY)  # sends nothing
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return [name for name in dict.fromkeys(found) if not ipaddress.ip_address(name).is_loopback]


def is_address(name: str) -> bool:
    """Whether it is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# Files that are given.


def _given(certificate: Path, key: Path) -> Tls:
    """A checked pair of files."""
    from cryptography import x509

    chain = _read(certificate, "certificate")
    try:
        leaf = x509.load_pem_x509_certificates(chain)[0]
    except ValueError:
        raise OptionError(
            f"{certificate}: holds no certificate in PEM; give the server's own, and those that "
            "vouch for it after it"
        ) from None
    now = datetime.now(UTC)
    if now > leaf.not_valid_after_utc:
        ended = leaf.not_valid_after_utc
        raise OptionError(f"{certificate}: the certificate expired on {ended:%Y-%m-%d}; renew it")
    if now < leaf.not_valid_before_utc:
        begins = leaf.not_valid_before_utc
        raise OptionError(
            f"{certificate}: the certificate is not valid before {begins:%Y-%m-%d %H:%M} UTC; "
            "wait, or set this machine's clock"
        )
    if _private_key(key).public_key() != leaf.public_key():
        raise OptionError(
            f"{key}: is not the key of {certificate}; give the one that the certificate was made "
            "for"
        )
    tls = Tls(certificate, key, _names_in(leaf))
    tls.context()  # refused here what OpenSSL refuses, too short a key for one
    return tls


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(
            f"{path}: the {what} cannot be read ({error.strerror}); check its name, and that this "
            "user may read it"
        ) from None


def _private_key(path: Path) -> "PrivateKeyTypes":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    pem = _read(path, "key")
    try:
        return load_pem_private_key(pem, None)
    except TypeError:
        raise OptionError(
            f"{path}: the key is encrypted; store it without a passphrase, for this user's eyes "
            f"alone: openssl pkey -in {path} -out PLAIN"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise OptionError(f"{path}: holds no private key in PEM") from None


def _names_in(certificate: "Certificate") -> tuple[str, ...]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    addresses = names.get_values_for_type(x509.IPAddress)
    return (*names.get_values_for_type(x509.DNSName), *map(str, addresses))


# A certificate that is made here.


def _own_names() -> set[str]:
    """Names and addresses of this machine, as it and others in its network know it."""
    name = socket.gethostname()
    names = {name, name if "." in name else f"{name}.local"}
    return {*_LOCAL, *filter(_can_be_certified, names), *own_addresses()}


def _can_be_certified(name: str) -> bool:
    """Whether it is one host's name or address: 0.0.0.0 and * stand for all."""
    if is_address(name):
        return not ipaddress.ip_address(name).is_unspecified
    return bool(_NAME.fullmatch(name))


def _self_signed(names: set[str]) -> Tls:
    """The certificate that is kept, or another where that ends soon or lacks one of ``names``.

    Another has the names of the one before as well, unless those are many: a laptop that comes
    home again shall find the one for which its browsers know an exception.
    """
    folder = cache_folder() / "tls"
    kept = Tls(folder / "certificate.pem", folder / "key.pem", (), self_signed=True)
    with _locked(folder):
        key = _kept_key(kept.key)
        try:
            before = _given(kept.certificate, kept.key)
        except OptionError:  # there is none, or it is of no use
            before = kept
        if not (names <= set(before.names) and _lasts(kept.certificate)):
            if len(before.names) < _MOST_NAMES:
                names |= set(before.names)
            write_whole(kept.certificate, _certificate(key, sorted(names)))
            before = _given(kept.certificate, kept.key)
    return Tls(kept.certificate, kept.key, before.names, self_signed=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, in a folder that only its owner may look into.

    Raises:
        OutputError: the disk cannot take it.
    """
    import fcntl

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise OutputError(
            f"{folder}: no certificate can be kept there ({error.strerror})"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lasts(certificate: Path) -> bool:
    from cryptography import x509

    ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    return ends - datetime.now(UTC) > _RENEWED_BEFORE


def _kept_key(path: Path) -> Any:
    """The key that is kept, or a new one where it is missing or damaged."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    with suppress(OptionError):
        return _private_key(path)
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_whole(path, pem, mode=0o600)
    return key


def _certificate(key: Any, names: Iterable[str]) -> bytes:
    """A certificate for a server of these names, in PEM; it can vouch for no other."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mosstalk")])
    now, public = datetime.now(UTC), key.public_key()
    known = [
        x509.IPAddress(ipaddress.ip_address(name)) if is_address(name) else x509.DNSName(name)
        for name in names
    ]
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    builder = (
        x509.CertificateBuilder()
        .subject_name(issuer)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # for clocks that are slow
        .not_valid_after(now + _VALID)
    )
    for extension, critical in (
        (x509.SubjectAlternativeName(known), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (identifier, False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
    ):
        builder = builder.add_extension(extension, critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
