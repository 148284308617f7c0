"""TLS: what clients are let in by, which certificates are refused, and the one made here."""

import json
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Run, command_environment, refused, run
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from openai import AsyncOpenAI
from openai.types.websocket_connection_options import WebSocketConnectionOptions
from server_rig import BY_HAND, QUICK, Server, Talker, append, question, serving
from test_server_room import HANDSHAKE

from mosstalk.server import certificate as certificates
from mosstalk.server.certificate import Tls, tls_of

KEY = "a-key-for-tests"
HEADER_S, CONNECTIONS = 2, 12


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that has made its own certificate; who asks it trusts that and nothing else."""
    words = ("--tls-self-signed", "--api-key", KEY, "--limit", f"header_s={HEADER_S}")
    with serving(
        *QUICK, *words, "--limit", f"connections={CONNECTIONS}", cache=cache_folder
    ) as running:
        running.headers = {"Authorization": f"Bearer {KEY}"}
        yield running


@pytest.fixture(scope="module")
def trust(server: Server, cache_folder: Path) -> ssl.SSLContext:
    """A client's trust in the server's certificate alone, as strict as OpenSSL can be."""
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(cache_folder / "tls" / "certificate.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def test_the_page_and_all_that_is_asked_over_http_come_by_https(
    server: Server, trust: ssl.SSLContext
) -> None:
    for host in ("127.0.0.1", "localhost"):
        with httpx.Client(verify=trust, headers=server.headers) as client:
            base = f"https://{host}:{port_of(server)}"
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/page.js"):
                assert client.get(f"{base}{path}").status_code == 200, path
            page = client.get(f"{base}/")
            assert "<title>" in page.text
            assert f"wss://{host}:{port_of(server)}" in page.headers["content-security-policy"]
    server.await_line(r"^talk in a browser   https://localhost:\d+/$")
    server.await_line(r"^Realtime clients    wss://localhost:\d+/v1/realtime$")


def test_a_stranger_cannot_verify_the_certificate(server: Server) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health")


def test_the_doctor_says_how_to_trust_it_and_how_long_it_is_valid(
    server: Server, cache_folder: Path, mosstalk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    done = mosstalk("doctor", "--url", server.url)
    assert done.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in done.stdout
    assert "SSL_CERT_FILE" in done.stdout
    monkeypatch.setenv("SSL_CERT_FILE", str(cache_folder / "tls" / "certificate.pem"))
    monkeypatch.setenv("MOSSTALK_API_KEY", KEY)
    done = mosstalk("doctor", "--url", server.url)
    assert done.returncode == 0, done.stdout
    assert "ok     certificate  valid for 39" in done.stdout
    assert "ok     places       0 of 64 taken" in done.stdout
    done = mosstalk("doctor", "--url", server.url.replace("https", "http"))
    assert done.returncode == 1
    assert "wrong  health       status 400: " in done.stdout


def test_a_spoken_question_is_answered_over_wss(server: Server, trust: ssl.SSLContext) -> None:
    async def main() -> None:
        async with Talker(server, ssl=trust, additional_headers=server.headers) as talker:
            await talker.send(BY_HAND)
            await talker.say(question())
            await talker.send({"type": "input_audio_buffer.commit"}, {"type": "response.create"})
            done = (await talker.wait("response.done"))["response"]
            assert done["status"] == "completed"
            assert len(talker.pcm()) / 2 / 24_000 == done["mosstalk"]["timings"]["audio_s"] > 0

    run(main())
    server.await_nothing_held()


def test_openais_own_client_talks_over_wss(server: Server, trust: ssl.SSLContext) -> None:
    async def main() -> None:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY)
        options: WebSocketConnectionOptions = {"ssl": trust}  # type: ignore[typeddict-unknown-key]
        async with client.realtime.connect(
            model="any", websocket_connection_options=options
        ) as talk:
            await talk.session.update(session=BY_HAND["session"])  # type: ignore[arg-type]
            async for event in talk:
                if event.type == "session.updated":
                    break

    run(main())
    server.await_nothing_held()


def test_a_message_larger_than_what_tls_holds_arrives_whole(
    server: Server, trust: ssl.SSLContext
) -> None:
    async def main() -> None:
        async with Talker(server, ssl=trust, additional_headers=server.headers) as talker:
            await talker.send(BY_HAND, append(bytes(8 << 20)))
            await talker.send({"type": "input_audio_buffer.commit"})
            await talker.wait("input_audio_buffer.committed")

    run(main())
    server.await_nothing_held()


def test_who_speaks_plain_http_is_told_so_and_others_talk_on(server: Server) -> None:
    answer = httpx.get(server.url.replace("https", "http", 1) + "/health")
    assert answer.status_code == 400
    assert answer.headers["x-content-type-options"] == "nosniff"
    error = answer.json()["error"]
    assert error["code"] == "plain_http"
    assert "write https or wss" in error["message"]
    with socket.create_connection(("127.0.0.1", port_of(server)), 20) as raw:
        raw.sendall(HANDSHAKE.encode())
        assert hung_up(raw).startswith(b"HTTP/1.1 400 Bad Request")
    assert server.get("/health").status_code == 200
    assert not server.faults()


def hung_up(raw: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    heard = b""
    try:
        while data := raw.recv(4096):
            heard += data
    except ConnectionResetError:
        pass
    return heard


@pytest.mark.parametrize("beginning", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_a_handshake_that_takes_too_long_is_given_up(server: Server, beginning: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server)), 20) as raw:
        raw.sendall(beginning)
        began_s = time.monotonic()
        assert hung_up(raw) == b""
        assert HEADER_S - 0.5 < time.monotonic() - began_s < HEADER_S + 5


def test_handshakes_that_wait_count_as_connections_and_the_oldest_makes_room(
    server: Server,
) -> None:
    idle = [socket.create_connection(("127.0.0.1", port_of(server)), 20) for _ in range(30)]
    try:
        for raw in idle[::2]:
            raw.sendall(b"\x16\x03\x01")  # as TLS begins
        assert server.get("/health").status_code == 200
        assert [hung_up(raw) for raw in idle[:2]] == [b"", b""]
    finally:
        for raw in idle:
            raw.close()
    assert not server.faults()


def test_a_signal_ends_it_in_order(server: Server, trust: ssl.SSLContext) -> None:
    """The last of the server that the tests above share: it ends it."""

    async def main() -> None:
        async with Talker(server, ssl=trust, additional_headers=server.headers) as talker:
            server.signal(signal.SIGTERM)
            assert await talker.closed() == (1012, "the server ends; connect again")

    run(main())
    assert server.wait(20) == 0
    assert not server.faults()


# Files.


class Pair:
    """A key, and a certificate for it, in a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        days: tuple[int, int] = (-1, 1),
        names: tuple[str, ...] = (),
        private: Any = None,
    ) -> None:
        self.certificate, self.key = folder / "chain.pem", folder / "own.key"
        self.private = private or ec.generate_private_key(ec.SECP256R1())
        self.store_key(self.private)
        now = datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.private.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1]))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), False)
            .sign(self.private, hashes.SHA256())
        )
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def store_key(self, key: Any, passphrase: bytes | None = None) -> None:
        """Write a key, with a passphrase if there is one."""
        how = serialization.NoEncryption()
        if passphrase:
            how = serialization.BestAvailableEncryption(passphrase)  # type: ignore[assignment]
        kind = serialization.PrivateFormat.PKCS8
        self.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, how))

    @property
    def words(self) -> tuple[str | Path, ...]:
        """The command that would serve with them."""
        return ("serve", "--tls-cert", self.certificate, "--tls-key", self.key, "--print-config")


def test_the_certificates_names_are_the_servers_and_are_printed(
    mosstalk: Run, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, names=("talk.example.org", "*.example.org"))
    shown = json.loads(mosstalk(*pair.words).stdout)
    assert shown["tls"]["certificate"] == str(pair.certificate)
    assert shown["tls"]["names"] == ["talk.example.org", "*.example.org"]
    assert "talk.example.org" in shown["hosts"]
    assert "*.example.org" not in shown["hosts"]
    tls = tls_of(pair.certificate, pair.key, False, ())
    assert tls
    assert tls.host == "talk.example.org"
    assert tls_of(None, None, False, ()) is None
    assert json.loads(mosstalk("serve", "--print-config").stdout)["tls"] is None


def test_files_that_cannot_be_used_are_refused_in_a_sentence(mosstalk: Run, tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    whole = pair.certificate.read_bytes()

    def says() -> str:
        return refused(mosstalk(*pair.words))

    pair.certificate.write_bytes(b"-----BEGIN CERTIFICATE-----\n")
    assert f"{pair.certificate}: holds no certificate in PEM; give" in says()
    pair.certificate.unlink()
    assert f"{pair.certificate}: the certificate cannot be read (No such file" in says()
    pair.certificate.write_bytes(whole)
    pair.store_key(pair.private, b"secret")
    assert f"{pair.key}: the key is encrypted; store it without a passphrase" in says()
    pair.store_key(ec.generate_private_key(ec.SECP256R1()))
    assert f"{pair.key}: is not the key of {pair.certificate}; give" in says()
    pair.store_key(rsa.generate_private_key(65537, 2048))
    assert f"{pair.key}: is not the key of {pair.certificate}; give" in says()
    pair.key.write_bytes(whole)
    assert f"{pair.key}: holds no private key in PEM" in says()
    pair.key.unlink()
    pair.key.mkdir()
    assert f"{pair.key}: the key cannot be read (Is a directory)" in says()


@pytest.mark.parametrize(
    ("days", "said"), [((-9, -1), "expired on"), ((1, 9), "is not valid before")]
)
def test_a_certificate_is_refused_outside_its_time(
    mosstalk: Run, tmp_path: Path, days: tuple[int, int], said: str
) -> None:
    pair = Pair(tmp_path, days=days)
    assert f"{pair.certificate}: the certificate {said} 20" in refused(mosstalk(*pair.words))


def test_a_key_that_is_too_short_for_tls_is_refused(mosstalk: Run, tmp_path: Path) -> None:
    pair = Pair(tmp_path, private=rsa.generate_private_key(65537, 1024))
    assert "TLS cannot use this certificate with this key" in refused(mosstalk(*pair.words))


def test_options_that_do_not_go_together_are_refused(mosstalk: Run, tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    both = mosstalk(*pair.words, "--tls-self-signed")
    assert "--tls-cert and --tls-key, or --tls-self-signed, not both" in refused(both)
    for option, path, other in (
        ("--tls-cert", pair.certificate, "--tls-key"),
        ("--tls-key", pair.key, "--tls-cert"),
    ):
        alone = mosstalk("serve", option, path, "--print-config")
        assert f"give {other} as well" in refused(alone)
    crowd = mosstalk(*pair.words, "--front-processes", "2")
    assert "leave out --front-processes, or put a proxy" in refused(crowd)
    shown = json.loads(mosstalk(*pair.words, "--max-sessions", "256").stdout)
    assert shown["front_processes"] == 0


# The certificate that is made.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is kept."""
    monkeypatch.setenv("MOSSTALK_CACHE", str(tmp_path))
    return tmp_path / "tls"


def made(*names: str) -> Tls:
    """What a server would be started with."""
    tls = tls_of(None, None, True, names)
    assert tls
    return tls


def test_it_is_for_all_names_of_the_machine_and_its_key_is_its_owners(folder: Path) -> None:
    tls = made("talk.example.org", "10.9.8.7", "0.0.0.0", "*")
    assert {"localhost", "127.0.0.1", "::1", "talk.example.org", "10.9.8.7"} <= set(tls.names)
    assert set(certificates.own_addresses()) <= set(tls.names)
    assert not {"0.0.0.0", "*"} & set(tls.names)
    assert tls.host == "localhost"
    assert (tls.certificate.parent, tls.key.parent) == (folder, folder)
    assert stat.S_IMODE(tls.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_it_stays_as_long_as_it_will_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made("a.example").certificate.read_bytes()
    assert made().certificate.read_bytes() == first, "a name less"
    key = (folder / "key.pem").read_bytes()
    moved = made("b.example")
    assert moved.certificate.read_bytes() != first
    assert {"a.example", "b.example"} <= set(moved.names)
    moved_bytes = moved.certificate.read_bytes()
    assert made("a.example").certificate.read_bytes() == moved_bytes, "home again"
    monkeypatch.setattr(certificates, "_RENEWED_BEFORE", certificates._VALID)
    renewed = made()
    assert renewed.certificate.read_bytes() != moved_bytes, "it ends soon"
    assert renewed.names == moved.names
    assert (folder / "key.pem").read_bytes() == key
    monkeypatch.undo()


@pytest.mark.parametrize("damaged", ["key.pem", "certificate.pem"])
def test_it_is_made_anew_where_a_file_is_damaged(folder: Path, damaged: str) -> None:
    made()
    (folder / damaged).write_bytes(b"")
    made().context()
    assert (folder / damaged).read_bytes()
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600


def test_servers_that_start_together_have_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mosstalk.cli", "serve", "--tls-self-signed", "--print-config"]
    starts = [
        subprocess.Popen(command, env=command_environment(tmp_path), stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    shown = [json.loads(start.communicate(timeout=120)[0]) for start in starts]
    assert shown[0]["tls"] == shown[1]["tls"] == shown[2]["tls"]
    tls = shown[0]["tls"]
    Tls(Path(tls["certificate"]), Path(tls["key"]), ()).context()


def test_a_cache_that_cannot_be_written_is_refused(
    mosstalk: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.joinpath("file").touch()
    monkeypatch.setenv("MOSSTALK_CACHE", str(folder.parent / "file"))
    said = refused(mosstalk("serve", "--tls-self-signed", "--print-config"))
    assert "no certificate can be kept there" in said
