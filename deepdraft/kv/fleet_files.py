"""The files of a fleet: a private authority, a certificate for each server, the manifest key.

Owns: how they are made and read. Knows nothing of: connections, directories, conversations.

`DIR/ca.pem` and `DIR/ca.key` stay with the operator. `DIR/nodes/NAME/` is what server NAME needs:
ca.pem, cert.pem, key.pem, manifest.key. Private files have mode 0600.
"""

from __future__ import annotations

import datetime
import os
import re
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from deepdraft.errors import ConfigError

KEY_BYTES = 32
DAYS = 365
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_.-]{1,253}")


@dataclass(frozen=True, slots=True)
class FleetFiles:
    """What a server takes from its directory."""

    server_tls: ssl.SSLContext
    client_tls: ssl.SSLContext
    manifest_key: bytes = field(repr=False)


def load_fleet(directory: Path) -> FleetFiles:
    """A server's own directory. Raises ConfigError."""
    try:
        key = (directory / "manifest.key").read_bytes()
        contexts = []
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(directory / "ca.pem")
            context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
            contexts.append(context)
    except OSError as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or "unreadable"
        raise ConfigError(
            f"{directory} does not hold a fleet's files (ca.pem, cert.pem, key.pem, manifest.key): "
            f"{reason}; make them with: deepdraft kv init-fleet DIR --node NAME"
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{directory / 'manifest.key'} must hold {KEY_BYTES} bytes")
    return FleetFiles(contexts[0], contexts[1], key)


def init_fleet(directory: Path, nodes: Sequence[str], hosts: Sequence[str] = ()) -> list[Path]:
    """Makes a fleet's files, or adds nodes to one; returns the nodes' directories.

    `hosts`: further names and addresses that every certificate is valid for. Raises ConfigError.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(
            "certificates need the package cryptography: pip install 'deepdraft[kv]'"
        ) from None
    names = [_host(host) for host in hosts]
    for name in nodes:
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise ConfigError(f"a node's name is 1 to 64 of A-Z a-z 0-9 _ . -, got {name!r}")
        if (directory / "nodes" / name).exists() or nodes.count(name) > 1:
            raise ConfigError(f"{directory / 'nodes' / name} is there already, or named twice")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca = _Authority.of(directory)
        made = []
        for name in nodes:
            place = directory / "nodes" / name
            place.mkdir(mode=0o700, parents=True)
            key = ec.generate_private_key(ec.SECP256R1())
            _write(place / "cert.pem", ca.certify(name, key, names), private=False)
            _write(place / "key.pem", _pem(key))
            _write(place / "ca.pem", (directory / "ca.pem").read_bytes(), private=False)
            _write(place / "manifest.key", (directory / "manifest.key").read_bytes())
            made.append(place)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return made


class _Authority:
    """The private authority of one fleet."""

    def __init__(self, key: object, name: object) -> None:
        self.key, self.name = key, name

    @classmethod
    def of(cls, directory: Path) -> _Authority:
        """The one of a directory, made where there is none."""
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "deepdraft fleet")])
        if (directory / "ca.key").exists():
            pem = (directory / "ca.key").read_bytes()
            try:
                key = serialization.load_pem_private_key(pem, None)
            except (ValueError, TypeError, UnsupportedAlgorithm) as error:
                raise ConfigError(
                    f"{directory / 'ca.key'} holds no private key without a password; put the "
                    f"fleet's own back, or make another fleet in an empty directory"
                ) from error
            return cls(key, name)
        key = ec.generate_private_key(ec.SECP256R1())
        ca = cls(key, name)
        _write(directory / "ca.key", _pem(key))
        _write(directory / "ca.pem", ca._sign(name, key, [], authority=True), private=False)
        _write(directory / "manifest.key", secrets.token_bytes(KEY_BYTES))
        return ca

    def certify(self, name: str, key: object, hosts: Sequence[object]) -> bytes:
        """A certificate of a server, PEM. `hosts`: of `_host`."""
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        names = [x509.DNSName(name), *hosts]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return self._sign(subject, key, names, authority=False)

    def _sign(self, subject: object, key: object, names: list, *, authority: bool) -> bytes:  # type: ignore[type-arg]
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        now = datetime.datetime.now(datetime.UTC)
        days = 10 * DAYS if authority else DAYS
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)  # type: ignore[arg-type]
            .issuer_name(self.name)  # type: ignore[arg-type]
            .public_key(key.public_key())  # type: ignore[attr-defined]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()),  # type: ignore[attr-defined]
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),  # type: ignore[attr-defined]
                critical=False,
            )
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self.key, hashes.SHA256())  # type: ignore[arg-type]
        return signed.public_bytes(serialization.Encoding.PEM)


def _host(host: str) -> object:
    """An address or a name, as it stands in certificates. Raises ConfigError."""
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"a host is an IP address or a name of A-Z a-z 0-9 _ . - (international names as "
                f"xn--...), got {host!r}"
            ) from None
        return x509.DNSName(host)


def _pem(key: object) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, *, private: bool = True) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, 0o600 if private else 0o644), "wb") as file:
        file.write(data)
