"""When to ask again, as a server says it."""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds, or a date against the server's own: no clock of ours has a part in it. Names are looked up as `headers` does."""
    asked = headers.get("Retry-After", "").strip()
    if asked.isascii() and asked.isdigit():
        return float(asked[:9])
    try:
        return (parsedate_to_datetime(asked) - parsedate_to_datetime(headers.get("Date", ""))).total_seconds()
    except (ValueError, TypeError):
        return None
