"""The console of the demo: serves the demo's instance to this machine until stopped, with a link that signs in."""

import time

from trellis.app.instance import Instance
from trellis.app.wiring import check_home_issuer, new_id, trusted_keys
from trellis.cli.invocation import Cli, user_name
from trellis.cli.up_process import print_ready, run_together, stopped_by_signals
from trellis.engine.jobs import Actor
from trellis.gateway import create_app
from trellis.gateway.sign_in import SignInCodes
from trellis.http_server.health import ProcessHealth
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.lifecycles import Role

LOOPBACK = "127.0.0.1"


async def serve_console(cli: Cli, instance: Instance, url: str, *, proposal: str) -> None:
    """Serve until Ctrl-C or SIGTERM. The link opens the proposal; what is approved is applied while this runs."""
    keys = trusted_keys(url, instance.settings)
    options = ServerOptions(host=LOOPBACK, port=0)  # a port of its own: an instance may run on the usual one
    listening = listen(options, key_configured=False)
    try:
        await check_home_issuer(instance.ledger, instance.settings, by=Actor(role=Role.GATEWAY, name=cli.process))
        codes = SignInCodes(key=keys[0], name=user_name(), now=time.time)
        app = create_app(instance, keys, monotonic=time.monotonic, new_id=new_id, sign_in_codes=codes)
        stop = stopped_by_signals(ProcessHealth())

        def ready() -> None:
            cli.out.line("Or decide in a browser. This link signs in, once, within 15 minutes:")
            cli.out.line(f"  {listening.url}/console/proposals?id={proposal}#code={codes.new_code()}", style="bold")
            print_ready(cli)

        await run_together(
            stop,
            instance.serve(stop, None, queue_jobs=False),
            serve_gateway(app, listening, options, stop, end_streams=app.state.streams.hub.close, ready=ready),
        )
    finally:
        listening.close()
