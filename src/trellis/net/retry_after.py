"""Parses the Retry-After header."""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The delay in seconds. A date is compared with the server's own Date header, so the local clock does not matter.

    None if the header is missing or invalid. Header names are looked up as `headers` does.
    """
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return (parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("Date", ""))).total_seconds()
    except (ValueError, TypeError):
        return None
