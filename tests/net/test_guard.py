"""The way out: what is refused is refused before a packet, and what is sent goes to the address that was judged."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.net.listening import NAME, listening, make_certificates
from trellis.net.guard import GuardedClient, OutgoingPolicy
from trellis.net.targets import (
    AddressRefused,
    AnswerRefused,
    OutgoingUnavailable,
    UrlRefused,
    is_public,
    is_usable,
    read_ip,
    read_target,
)

# PORT is the port of the listener on every address of this machine; names lead to this machine too.
HOSTILE = (
    # this machine, written in every way
    "https://127.0.0.1:PORT/",
    "https://127.0.0.2:PORT/",
    "https://127.1:PORT/",
    "https://127.0.1:PORT/",
    "https://2130706433:PORT/",
    "https://0x7f000001:PORT/",
    "https://0x7f.0.0.1:PORT/",
    "https://0x7f.1:PORT/",
    "https://0177.0.0.1:PORT/",
    "https://017700000001:PORT/",
    "https://127.000.000.001:PORT/",
    "https://127.0.0.1.:PORT/",
    "https://0:PORT/",
    "https://0.0.0.0:PORT/",
    "https://00.0.0.0:PORT/",
    "https://0x:PORT/",
    "https://4294967297:PORT/",
    "https://127.0.0.1.0x0:PORT/",
    "https://[::1]:PORT/",
    "https://[0:0:0:0:0:0:0:1]:PORT/",
    "https://[::]:PORT/",
    "https://[::127.0.0.1]:PORT/",
    "https://[::ffff:127.0.0.1]:PORT/",
    "https://[::ffff:7f00:1]:PORT/",
    "https://[::ffff:0:127.0.0.1]:PORT/",
    "https://[64:ff9b::127.0.0.1]:PORT/",
    "https://[64:ff9b:1::7f00:1]:PORT/",
    "https://[2002:7f00:1::]:PORT/",
    "https://[2001:0:7f00:1::]:PORT/",
    "https://[::1%25lo]:PORT/",
    "https://[fe80::1%25eth0]:PORT/",
    "https://[fe80::1%eth0]:PORT/",
    "https://[::1:PORT/",
    "https://[127.0.0.1]:PORT/",
    # other places that are nobody's business
    "https://10.0.0.1:PORT/",
    "https://172.16.0.1:PORT/",
    "https://192.168.1.1:PORT/",
    "https://100.100.100.200:PORT/latest/meta-data/",
    "https://169.254.169.254:PORT/latest/meta-data/",
    "https://[fd00:ec2::254]:PORT/latest/meta-data/",
    "https://168.63.129.16:PORT/metadata/",
    "https://192.0.0.192:PORT/opc/v2/",
    "https://[fc00::1]:PORT/",
    "https://[fec0::1]:PORT/",
    "https://[ff02::1]:PORT/",
    "https://224.0.0.1:PORT/",
    "https://255.255.255.255:PORT/",
    "https://198.18.0.1:PORT/",
    # names that lead here
    "https://localhost:PORT/",
    "https://LOCALHOST:PORT/",
    "https://localhost.localdomain:PORT/",
    "https://metadata.google.internal:PORT/",
    "https://rebound.example.test:PORT/",
    "https://127.0.0.1.nip.example.test:PORT/",
    "https://half.example.test:PORT/",
    "https://odd.example.test:PORT/",
    # two readers, two opinions
    "https://1.1.1.1@127.0.0.1:PORT/",
    "https://user:secret@127.0.0.1:PORT/",
    "https://1.1.1.1:443@127.0.0.1:PORT/",
    "https://127.0.0.1:PORT\\@1.1.1.1/",
    "https://1.1.1.1\\@127.0.0.1:PORT/",
    "https:\\\\127.0.0.1:PORT/",
    "https:/127.0.0.1:PORT/",
    "https:127.0.0.1:PORT/",
    "//127.0.0.1:PORT/",
    "https://1.1.1.1#@127.0.0.1:PORT/",
    "https://127.0.0.1:PORT#@1.1.1.1/",
    "https://1.1.1.1%00@127.0.0.1:PORT/",
    "https://127.0.0.1%2f@1.1.1.1:PORT/",
    "https://127.0.0.1%00.example.com:PORT/",
    "https://example.com\r\nHost: 127.0.0.1:PORT/",
    "https://127.0.0.1:PORT/\r\nX-Injected: 1",
    "https://127.0.0.1:PORT/ HTTP/1.1\r\nHost: x",
    "https://127.0.0.1:PORT\t/",
    " https://127.0.0.1:PORT/",
    "https://127。0。0。1:PORT/",
    "https://127．0．0．1:PORT/",  # noqa: RUF001 - the wide dots are the point
    "https://①②⑦.⓪.⓪.①:PORT/",
    "https://ⓛocalhost:PORT/",
    "https://loc\u00adalhost:PORT/",
    "https://localhost.:PORT/",
    "https://localhost..:PORT/",
    "https://.localhost:PORT/",
    "https://-localhost:PORT/",
    "https://127.0.0.1:0PORT:PORT/",
    "https://127.0.0.1:PORT:443/",
    "https://127.0.0.1:+PORT/",
    "https://127.0.0.1:99999/",
    "https://:PORT/",
    "https:///127.0.0.1:PORT/",
    "",
    # other ways to speak, and other doors
    "http://127.0.0.1:PORT/",
    "http://rebound.example.test:PORT/",
    "http://localhost:PORT/",
    "file:///etc/passwd",
    "file://127.0.0.1:PORT/etc/passwd",
    "gopher://127.0.0.1:PORT/_GET%20/",
    "dict://127.0.0.1:PORT/",
    "ftp://127.0.0.1:PORT/",
    "ldap://127.0.0.1:PORT/",
    "jar:https://127.0.0.1:PORT/!/",
    "data:text/plain,x",
    "ws://127.0.0.1:PORT/",
    "http+unix://%2fvar%2frun%2fdocker.sock/",
    "https://1.1.1.1:22/",
    "https://1.1.1.1:6379/",
    "https://127.0.0.1:PORT/" + "a" * 4_000,
)


async def here(host: str, port: int) -> Sequence[str]:
    """Every name leads to this machine."""
    return {"half.example.test": ["1.1.1.1", "127.0.0.1"], "odd.example.test": ["127.1"]}.get(host, ["127.0.0.1"])


async def test_no_hostile_url_reaches_this_machine():
    assert len(HOSTILE) >= 60
    async with listening("127.0.0.1") as listener, _also_on_ipv6(listener.port) as over_ipv6:
        policy = OutgoingPolicy(public_ports=frozenset({443, listener.port}), total_s=5.0)
        async with GuardedClient(policy, resolve=here) as client:
            for pattern in HOSTILE:
                url = pattern.replace("PORT", str(listener.port))
                with pytest.raises((UrlRefused, AddressRefused)) as refusal:
                    await client.send("GET", url)
                assert "secret" not in str(refusal.value), url
        await _round_trip(listener.port)
        # The last visitor shows that this listener would have seen the others.
        assert (listener.connections, over_ipv6.connections) == (1, 0)


async def _round_trip(port: int) -> None:
    policy = OutgoingPolicy(origins=(f"http://127.0.0.1:{port}",))
    async with GuardedClient(policy) as client:
        assert (await client.send("GET", f"http://127.0.0.1:{port}/")).body == b"ok"


def _also_on_ipv6(port: int):
    return listening("::1", port=port) if _has_ipv6() else listening("127.0.0.1")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_the_connection_goes_to_the_address_that_was_judged_and_the_name_stays(tmp_path: Path):
    """Whoever answers the second question differently is not asked a second time."""
    certificates = make_certificates(tmp_path, NAME)
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    async with listening(tls=certificates.server()) as first, listening("127.0.0.2", port=first.port) as second:
        policy = OutgoingPolicy(origins=(f"https://{NAME}:{first.port}",))
        async with GuardedClient(policy, resolve=rebinding, tls=certificates.client()) as client:
            answer = await client.send("POST", f"https://{NAME}:{first.port}/in?x=1", content=b"{}", headers={"a": "b"})
        assert (answer.status, answer.body, asked) == (200, b"ok", [NAME])
        assert first.names == [NAME]
        request = first.requests[0].decode().lower()
        assert request.startswith("post /in?x=1 http/1.1\r\n")
        assert f"host: {NAME}:{first.port}\r\n" in request
        assert (first.connections, second.connections) == (1, 0)


async def test_a_certificate_of_another_name_is_refused(tmp_path: Path):
    certificates = make_certificates(tmp_path, "other.example.test")
    async with listening(tls=certificates.server()) as listener:
        policy = OutgoingPolicy(origins=(f"https://{NAME}:{listener.port}",))
        async with GuardedClient(policy, resolve=here, tls=certificates.client()) as client:
            with pytest.raises(OutgoingUnavailable):
                await client.send("GET", f"https://{NAME}:{listener.port}/")
        assert listener.requests == []


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(code: int):
    async with listening() as inside:
        told = f"HTTP/1.1 {code} X\r\nlocation: http://127.0.0.1:{inside.port}/\r\ncontent-length: 0\r\n\r\n"
        async with listening("127.0.0.2", answer=told.encode()) as outside:
            policy = OutgoingPolicy(origins=(f"http://127.0.0.2:{outside.port}",))
            async with GuardedClient(policy) as client:
                assert (await client.send("GET", f"http://127.0.0.2:{outside.port}/")).status == code
        assert inside.connections == 0


async def test_no_proxy_and_no_password_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async with listening() as proxy, listening("127.0.0.2") as outside:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        (tmp_path / "netrc").write_text("machine 127.0.0.2 login me password planted\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        async with GuardedClient(OutgoingPolicy(origins=(f"http://127.0.0.2:{outside.port}",))) as client:
            assert (await client.send("GET", f"http://127.0.0.2:{outside.port}/")).status == 200
        assert (proxy.connections, outside.connections) == (0, 1)
        assert b"uthorization" not in outside.requests[0]


async def test_an_answer_is_bounded_in_bytes_and_taken_only_as_it_is():
    long = b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2_000
    packed = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok"
    for answer, says in ((long, "more than 1000 bytes"), (packed, "compressed")):
        async with listening(answer=answer) as listener:
            policy = OutgoingPolicy(origins=(f"http://127.0.0.1:{listener.port}",), answer_bytes_max=1_000)
            async with GuardedClient(policy) as client:
                with pytest.raises(AnswerRefused, match=says):
                    await client.send("GET", f"http://127.0.0.1:{listener.port}/")


async def test_an_answer_is_bounded_in_time():
    async with listening(hold=asyncio.Event) as listener:
        policy = OutgoingPolicy(origins=(f"http://127.0.0.1:{listener.port}",), total_s=0.05)
        async with GuardedClient(policy) as client:
            with pytest.raises(OutgoingUnavailable, match="not enough"):
                await client.send("GET", f"http://127.0.0.1:{listener.port}/")


async def test_the_next_address_is_tried_when_one_takes_no_connection():
    async with listening() as listener:
        policy = OutgoingPolicy(origins=(f"http://{NAME}:{listener.port}",))

        async def two(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.3", "127.0.0.1"]

        async with GuardedClient(policy, resolve=two) as client:
            assert (await client.send("GET", f"http://{NAME}:{listener.port}/")).body == b"ok"


async def test_a_listed_name_does_not_lead_to_a_metadata_service():
    async def pointed_away(host: str, port: int) -> Sequence[str]:
        return ["169.254.169.254"]

    async with GuardedClient(OutgoingPolicy(origins=(f"http://{NAME}",)), resolve=pointed_away) as client:
        with pytest.raises(AddressRefused):
            await client.send("GET", f"http://{NAME}/latest/meta-data/")


async def test_guard_without_public_access_allows_only_listed_origins():
    async with GuardedClient(OutgoingPolicy(origins=("https://hooks.example.test",), public=False)) as client:
        client.check("https://hooks.example.test/x")
        client.check("https://HOOKS.example.test:443/x")
        for other in ("https://example.com/", "https://hooks.example.test:444/", "http://hooks.example.test/"):
            with pytest.raises(UrlRefused, match="listed"):
                client.check(other)


async def test_a_caller_cannot_choose_the_host_header():
    async with GuardedClient(OutgoingPolicy()) as client:
        with pytest.raises(UrlRefused, match="host"):
            await client.send("GET", "https://example.com/", headers={"Host": "inside"})


@pytest.mark.parametrize(
    "url, origin, path",
    [
        ("https://example.com", "https://example.com:443", "/"),
        ("HTTPS://EXAMPLE.com/A?b=c&d=%20", "https://example.com:443", "/A?b=c&d=%20"),
        ("https://xn--bcher-kva.example:8443/x", "https://xn--bcher-kva.example:8443", "/x"),
        ("https://[2606:4700:4700:0::1111]/", "https://[2606:4700:4700::1111]:443", "/"),
        ("https://1.1.1.1/", "https://1.1.1.1:443", "/"),
    ],
)
def test_ordinary_urls_are_taken_as_they_are_meant(url: str, origin: str, path: str):
    target = read_target(url)
    assert (target.origin, target.path) == (origin, path)


@pytest.mark.parametrize("text", ["1.1.1.1", "8.8.8.8", "2606:4700:4700::1111", "2a00:1450::1"])
def test_public_addresses_are_allowed(text: str):
    address = read_ip(text)
    assert address is not None
    assert is_public(address)
    assert is_usable(address)
