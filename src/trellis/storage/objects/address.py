"""The address of a store, and its credentials, which are never part of the address."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from trellis.storage.objects.keys import checked_key, file_path
from trellis.storage.objects.store import KeyInvalid, StoreUrlInvalid

REGION_DEFAULT = "us-east-1"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ENDPOINT = re.compile(r"https?://[^/@?#]+/?")
_QUERY = {"endpoint", "region"}


@dataclass(frozen=True, kw_only=True)
class S3Credentials:
    """Credentials for the store. The representation shows no secret."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """A bucket, and the prefix in it under which all objects are."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = REGION_DEFAULT

    @property
    def url(self) -> str:
        """The address in the form of the settings."""
        query = {"endpoint": self.endpoint, "region": self.region}
        parameters = urlencode({name: value for name, value in query.items() if value}, safe=":/")
        return f"s3://{self.bucket}/{quote(self.prefix)}?{parameters}"


def s3_credentials(environment: Mapping[str, str]) -> S3Credentials | None:
    """The credentials from the usual AWS variables; None if they are not set."""
    key_id, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not key_id or not secret:
        return None
    token = environment.get("AWS_SESSION_TOKEN") or None
    return S3Credentials(access_key_id=key_id, secret_access_key=secret, session_token=token)


def read_address(url: str) -> Path | S3Address:
    """The folder or bucket that a URL names. Raises StoreUrlInvalid, whose message contains no secret."""
    parts = _split(url)
    return _s3_address(parts, url) if parts.scheme == "s3" else _folder(parts, url)


def object_url(store: str, key: str) -> str:
    """The URL of one object of this store: its file, or its address in the bucket.

    Raises StoreUrlInvalid, KeyInvalid.
    """
    place = read_address(store)
    if isinstance(place, Path):
        return place.joinpath(*(name.decode() for name in file_path(checked_key(key)))).as_uri()
    endpoint = place.endpoint or f"https://s3.{place.region}.amazonaws.com"
    path = "/".join(filter(None, (place.bucket, place.prefix, checked_key(key))))
    return f"{endpoint}/{quote(path)}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreUrlInvalid(url=_without_user(url), reason=str(error)) from error
    if "@" in parts.netloc:
        raise StoreUrlInvalid(url=_without_user(url), reason="credentials do not belong in it")
    if parts.scheme not in {"file", "s3"}:
        raise StoreUrlInvalid(url=_without_user(url), reason="it begins with neither file:// nor s3://")
    if parts.fragment:
        raise StoreUrlInvalid(url=url, reason="it holds a #; write %23")
    return parts


def _folder(parts: SplitResult, url: str) -> Path:
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or parts.query:
        raise StoreUrlInvalid(url=url, reason="a folder is written with its whole path, after three slashes")
    if "\0" in path or path.strip("/") == "":
        raise StoreUrlInvalid(url=url, reason="it names no folder")
    return Path(path)


def _s3_address(parts: SplitResult, url: str) -> S3Address:
    if not _BUCKET.fullmatch(parts.netloc):
        raise StoreUrlInvalid(url=url, reason="a bucket has 3 to 63 lower-case letters, digits, dots and hyphens")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(query) - _QUERY)
    if unknown:
        raise StoreUrlInvalid(url=_without_query(url), reason=f"there is no parameter {unknown[0]!r}")
    endpoint = query.get("endpoint")
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise StoreUrlInvalid(url=_without_query(url), reason="endpoint is http://host:port or https://host")
    prefix = unquote(parts.path).strip("/")
    try:
        prefix = checked_key(prefix) if prefix else ""
    except KeyInvalid as error:
        raise StoreUrlInvalid(url=url, reason=f"its prefix cannot be one: {error.data['reason']}") from error
    return S3Address(
        bucket=parts.netloc,
        prefix=prefix,
        endpoint=endpoint.rstrip("/") if endpoint else None,
        region=query.get("region") or REGION_DEFAULT,
    )


def _without_user(url: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", url)


def _without_query(url: str) -> str:
    return url.partition("?")[0]
