"""Coming in with keys: nkeys, credentials files of a server with an operator, and what is said of files that are wrong."""

import base64
import binascii
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.bus.wire.conftest import Heard, net_at, new_id, now, said, until
from tests.servers.nats import NatsServer, running_nats
from trellis.app.wiring import SystemClock
from trellis.bus.errors import BusUnavailable
from trellis.bus.wire import BusOptions, open_bus
from trellis.bus.wire.connection import read_credentials
from trellis.engine.errors import SettingsInvalid

OPERATOR, ACCOUNT, USER = 14 << 3, 0, 20 << 3
FREE = {"subs": -1, "data": -1, "payload": -1}


def encoded(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")


def url64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


@dataclass(frozen=True)
class Key:
    """An nkey, made as NATS writes them down."""

    kind: int
    private: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def public(self) -> str:
        return encoded(bytes([self.kind]) + self.private.public_key().public_bytes_raw())

    @property
    def seed(self) -> str:
        kinds = bytes([(18 << 3) | self.kind >> 5, (self.kind & 31) << 3])
        return encoded(kinds + self.private.private_bytes_raw())

    def jwt(self, of: "Key", type_: str, **claims: Any) -> str:
        """What this key says of another."""
        said = {
            "jti": of.public,
            "iat": int(time.time()),
            "iss": self.public,
            "name": type_,
            "sub": of.public,
            "nats": {"type": type_, "version": 2, **claims},
        }
        head = url64(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
        body = f"{head}.{url64(json.dumps(said).encode())}"
        return f"{body}.{url64(self.private.sign(body.encode()))}"


def credentials(jwt: str, seed: str) -> str:
    """A file as NATS's own tools write it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        "NKEY Seed printed below can be used to sign and prove identity.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


@dataclass(frozen=True)
class Realm:
    """An operator with one account, and the server that trusts them."""

    server: NatsServer
    account: Key

    def file(self, folder: Path, user: Key, **changed: str) -> Path:
        told = {"jwt": self.account.jwt(user, "user", **FREE), "seed": user.seed} | changed
        file = folder / "user.creds"
        file.write_text(credentials(told["jwt"], told["seed"]))
        return file


@pytest.fixture(scope="module")
def realm() -> Iterator[Realm]:
    operator, account = Key(OPERATOR), Key(ACCOUNT)
    limits = {**FREE, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    lines = [
        f"operator: {operator.jwt(operator, 'operator')}",
        "resolver: MEMORY",
        f"resolver_preload: {{ {account.public}: {operator.jwt(account, 'account', limits=limits)} }}",
    ]
    with running_nats(settings="\n".join(lines)) as server:
        yield Realm(server, account)


def nkey_settings(user: Key) -> str:
    return f"authorization {{ users: [ {{ nkey: {user.public} }} ] }}"


async def is_in(url: str, file: Path) -> None:
    async with net_at(url, creds_file=file) as net:
        bus, subject, heard = await net.bus(), net.subject(), Heard()
        assert bus.connected
        await bus.listen(subject, heard)
        await bus.publish(subject, said("in"), trace_id="t", needs_listener=True)
        await heard.until(1)


async def is_out(url: str, file: Path) -> None:
    async with net_at(url, creds_file=file) as net:
        bus = await net.bus()
        assert not bus.connected
        with pytest.raises(BusUnavailable, match="Authorization Violation"):
            await bus.publish(net.subject(), said(""), trace_id="t")


async def test_a_credentials_file_opens_a_server_with_an_operator(realm: Realm, tmp_path: Path):
    await is_in(realm.server.url, realm.file(tmp_path, Key(USER)))


async def test_a_users_seed_alone_opens_a_server_that_knows_its_nkey(tmp_path: Path):
    user, file = Key(USER), tmp_path / "user.nk"
    file.write_text(f"{user.seed}\n")
    with running_nats(settings=nkey_settings(user)) as server:
        await is_in(server.url, file)


async def test_client_without_credentials_gets_an_authorization_error(realm: Realm, tmp_path: Path):
    user = Key(USER)
    forged = Key(ACCOUNT).jwt(user, "user", **FREE)
    await is_out(realm.server.url, realm.file(tmp_path, user, jwt=forged))
    file = tmp_path / "user.nk"
    file.write_text(Key(USER).seed)
    with running_nats(settings=nkey_settings(user)) as server:
        await is_out(server.url, file)


async def test_credentials_are_no_hindrance_on_a_server_that_asks_for_none(plain_server: NatsServer, tmp_path: Path):
    file = tmp_path / "user.nk"
    file.write_text(Key(USER).seed)
    await is_in(plain_server.url, file)


# The client library leaves a socket behind when a connection breaks while it is made.
@pytest.mark.filterwarnings("ignore:.*(StreamWriter.__del__|_SelectorTransport.__del__|<socket.socket):Warning")
async def test_a_file_that_is_replaced_counts_from_the_next_connection_on(tmp_path: Path):
    old, new, file = Key(USER), Key(USER), tmp_path / "user.nk"
    file.write_text(old.seed)
    with running_nats(settings=nkey_settings(old)) as server:
        async with net_at(server.url, creds_file=file) as net:
            bus = await net.bus()
            assert bus.connected
            server.kill()
            server._settings = nkey_settings(new)
            file.write_text("")  # as while it is being written
            server.restart()
            await until(lambda: not bus.connected)
            await until(lambda: "no NATS credentials file" in bus._connection.error)
            file.write_text(new.seed)
            await until(lambda: bus.connected)
            await bus.publish(net.subject(), said(""), trace_id="t")


@pytest.mark.requirement("BUS-10")
async def test_missing_credentials_file_is_read_again_at_the_next_connection(plain_server: NatsServer, tmp_path: Path):
    seed, file = Key(USER).seed, tmp_path / "user.nk"
    file.write_text(seed)
    async with net_at(plain_server.url, creds_file=file) as net:
        bus = await net.bus()
        bus._connection.options = replace(bus._connection.options, reconnect_s=0.02)
        file.unlink()  # as before the next one is put there
        await bus._connection.client.close()
        await until(lambda: "cannot be read" in bus._connection.error)
        file.write_text(seed)
        await until(lambda: bus.connected)
        await bus.publish(net.subject(), said(""), trace_id="t")


def mistyped(seed: str) -> str:
    """With another letter in the middle."""
    return f"{seed[:20]}{'A' if seed[20] != 'A' else 'B'}{seed[21:]}"


A_USER = Key(USER)
A_JWT = Key(ACCOUNT).jwt(A_USER, "user")
WRONG = {
    "empty": ("", "no NATS credentials file"),
    "nonsense": ("hello", "no NATS credentials file"),
    "no text": (b"\xff\xfe", "is no text"),
    "an account's seed": (Key(ACCOUNT).seed, "begins with SU"),
    "a public key": (A_USER.public, "begins with SU"),
    "a mistyped seed": (mistyped(A_USER.seed), "begins with SU"),
    "a seed too short": (A_USER.seed[:-8], "begins with SU"),
    "no seed": (credentials(A_JWT, ""), "has no part 'USER NKEY SEED'"),
    "no JWT": (credentials("", A_USER.seed), "has no part 'NATS USER JWT'"),
    "cut off": (credentials(A_JWT, A_USER.seed)[:100], "has no part 'NATS USER JWT'"),
    "a JWT that is none": (credentials("a.b.c", A_USER.seed), "JWT that cannot be read"),
    "a JWT of one part": (credentials("abc", A_USER.seed), "JWT that cannot be read"),
    "a JWT about nobody": (credentials(f"a.{url64(b'[]')}.c", A_USER.seed), "JWT that cannot be read"),
    "somebody else's seed": (credentials(A_JWT, Key(USER).seed), "different users"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_file_that_is_wrong_is_named_with_what_is_wrong_and_nothing_secret(tmp_path: Path, what: str):
    content, told = WRONG[what]
    file = tmp_path / "user.creds"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = BusOptions(url="nats://127.0.0.1:1", creds_file=file)
    with pytest.raises(SettingsInvalid, match=told) as error:
        await open_bus(options, clock=SystemClock(), now=now, new_id=new_id)
    assert "user.creds" in str(error.value)
    assert A_USER.seed[:20] not in str(error.value)


def test_secrets_of_bus_credentials_are_not_shown(tmp_path: Path):
    file = tmp_path / "user.creds"
    file.write_text(credentials(A_JWT, A_USER.seed).replace("\n", "\r\n"))
    found = read_credentials(file)
    assert (found.public, found.jwt) == (A_USER.public, A_JWT)
    assert A_USER.seed not in repr(found)
    assert A_JWT not in repr(found)
    assert "key=" not in repr(found)
