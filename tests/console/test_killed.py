"""A gateway that is killed -9 while somebody looks at the console, and comes back at its address."""

import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.console.conftest import SEED, Screen, new_page
from tests.console.test_console import serious
from tests.console.test_live import RETRY_S_MAX, STATE
from tests.faults.fleet import Nursery, until
from tests.http.gateway_process import Orders
from tests.http.test_killed import Ward, free_port
from trellis import connect_sync
from trellis.app.wiring import ISSUER
from trellis.auth.tokens import issue, symmetric_key
from trellis.lifecycles import Role


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    """Gateway processes at one address, on one ledger."""
    nursery = Nursery("tests.http.gateway_process")
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    made = Ward(nursery, Orders(url=url, port=free_port(), secret=secrets.token_hex(32)), tmp_path)
    yield made
    made.end()
    nursery.close()


def listens(port: int) -> bool:
    """Whether somebody takes connections at this port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.requirement("PIPE-13", "RUN-5")
async def test_gateway_that_is_killed_leaves_what_was_known_and_comes_back(ward: Ward, browser: Browser):
    address = f"http://127.0.0.1:{ward.orders.port}"
    key = symmetric_key(bytes.fromhex(ward.orders.secret), issuer=ISSUER)
    token = issue(key, name="iryna", roles=[Role.OWNER], ttl_s=600, now=time.time())
    process = ward.start()
    screen = Screen(await new_page(browser))
    page, rows = screen.page, screen.page.locator(".grid-row")
    with connect_sync(address, token=token) as client:
        known = [client.jobs.submit("mail.send", {"to": one}).job_id for one in ("ada", "bela", "cleo")]
        await page.clock.install()
        await page.add_init_script(SEED % token)
        await page.goto(f"{address}/console/jobs")
        await expect(rows).to_have_count(len(known))
        await expect(page.locator(STATE)).to_contain_text("Live")

        process.send(signal.SIGKILL)
        await until(lambda: not process.is_alive, "the gateway is dead")
        await expect(page.get_by_text("The gateway does not answer. You see what was last known at")).to_be_visible()
        await expect(page.locator(STATE)).to_contain_text("Offline")
        assert {text.split()[0] for text in await rows.all_inner_texts()} == set(known)
        assert await serious(page) == []
        await screen.shot("offline")

        ward.start()
        await until(lambda: listens(ward.orders.port), "the gateway is back")
        await page.clock.run_for(RETRY_S_MAX * 1_000)  # the console waits longer after each failure
        await expect(page.locator(STATE)).to_contain_text("Live")
        await expect(page.get_by_text("The gateway does not answer.")).to_have_count(0)
        late = client.jobs.submit("mail.send", {"to": "dora"}).job_id
        await expect(page.locator(".grid-row", has_text=late)).to_be_visible()
    assert screen.errors == []
    await page.context.close()
