"""Events as they happen, each exactly once: a broken stream goes on after the last event that was received."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2
import pydantic

from trellis.http.calls import RETRIED_STATUSES, GatewayCalls, GatewayRequest, refuse_untrusted
from trellis.http.errors import AnswerInvalid, GatewayRefused, GatewayUnavailable
from trellis.http.shapes import LiveEvent

PATH = "/events/stream"
MEDIA_TYPE = "text/event-stream"
_DATA = pydantic.TypeAdapter(dict[str, Any])


async def follow(calls: GatewayCalls, params: Mapping[str, Any], after: str | None) -> AsyncGenerator[LiveEvent]:
    """Every event after a position, without end; without a position from now on.

    Raises what the gateway refuses, and GatewayUnavailable when it could not be reached again for `patience_s`.
    """
    last, failures, lost_at = after, 0, calls.clock.monotonic()
    while True:
        after_s, reason = None, "the stream ended"
        heard = False
        headers = {} if last is None else {"Last-Event-ID": last}
        try:
            async with calls.stream(GatewayRequest(method="GET", path=PATH, params=params, headers=headers)) as source:
                async for sent in source:
                    heard, after_s = True, after_s if sent.retry is None else sent.retry / 1000
                    # Positions sort as the feed does: what is not after the last one has been received already.
                    if not sent.id or (last is not None and sent.id <= last):
                        continue
                    last = sent.id
                    if sent.data:
                        yield _event(sent)
        except GatewayRefused as error:
            if error.status not in RETRIED_STATUSES:
                raise
            after_s, reason = error.retry_after_s, str(error)
        except httpx2.TransportError as error:
            refuse_untrusted(error, calls.url)
            reason = str(error) or type(error).__name__
        if heard:
            failures, lost_at = 0, calls.clock.monotonic()
        waited_s = calls.clock.monotonic() - lost_at
        if waited_s > calls.options.patience_s:
            raise GatewayUnavailable(
                url=calls.url, request=f"GET {PATH}", timeout_s=waited_s, attempts=failures, reason=reason, then=""
            )
        await calls.clock.sleep(calls.pause_s(failures, after_s))
        failures += 1


async def position(calls: GatewayCalls) -> str:
    """Where the events end now; raises what a request does."""
    ask = GatewayRequest(method="GET", path=PATH, params={"for_s": 0}, headers={"Accept": MEDIA_TYPE})
    for line in (await calls.ask(ask)).body.decode("utf-8", "replace").splitlines():
        if line.startswith("id:"):
            return line.removeprefix("id:").strip()
    raise AnswerInvalid(request=str(ask), reason="it names no position")


def _event(sent: httpx2.ServerSentEvent) -> LiveEvent:
    try:
        return LiveEvent.model_validate({**_DATA.validate_json(sent.data), "id": sent.id})
    except pydantic.ValidationError as error:
        raise AnswerInvalid(request=PATH, reason=f"event {sent.id}: {error.errors()[0]['msg']}") from None
