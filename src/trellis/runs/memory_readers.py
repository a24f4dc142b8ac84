"""How the steps of runs and queue jobs read agents' memory: from its repository, or through the gateway of the instance.

A process that reads through the gateway needs no repository on its host. It shows the gateway a credential of its own.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Protocol, TypeVar
from urllib.parse import quote, urlencode

import pydantic

from trellis.agents.run_io import DeepMemoryPage
from trellis.engine import tracing
from trellis.engine.errors import KeyUnusable, Refused
from trellis.net.components import AnswerUnreadable, ComponentClient, problem_detail, problem_fields, read_shape
from trellis.net.guard import FetchedResponse
from trellis.net.targets import OutgoingError
from trellis.storage.memory.errors import MemoryOverLimit, MemoryUnavailable
from trellis.storage.memory.layout import AgentId, CommitId, DeepPart, MemoryView, ReadMode, checked_agent_id
from trellis.storage.memory.repository import MemoryRepository

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of an answer. Layer 1 has at most some thousand tokens, a page of Layer 2 some more."""
ANSWER_S = 30.0
DETAIL_CHARS_MAX = 500
WORTH_ANOTHER_TRY = frozenset({408, 425, 429})
"""Refusals that may be over soon. Any other 4xx would be answered again in the same way."""
CREDENTIAL_STATUSES = frozenset({401, 403})

ShapeT = TypeVar("ShapeT", bound=pydantic.BaseModel)


class MemoryRefused(Refused):
    """The gateway at {url} does not give this process the memory of {agent_id}: {reason}."""


class MemoryReader(Protocol):
    """Reads the memory of one agent at a time."""

    async def read(self, agent_id: str, mode: ReadMode) -> MemoryView:
        """Layer 1 in this mode. Raises RepositoryError while memory is away; another TrellisError if it never works."""
        ...

    async def read_deep(self, agent_id: str, part: DeepPart, *, before: str | None, limit: int) -> DeepMemoryPage:
        """A page of Layer 2. Raises the errors of `read`."""
        ...

    async def close(self) -> None:
        """Close open connections."""
        ...


@dataclass(frozen=True, slots=True)
class RepositoryReader:
    """Reads the repository on this host."""

    memory: MemoryRepository

    async def read(self, agent_id: str, mode: ReadMode) -> MemoryView:
        return await asyncio.to_thread(self.memory.read, agent_id, mode)

    async def read_deep(self, agent_id: str, part: DeepPart, *, before: str | None, limit: int) -> DeepMemoryPage:
        view = await asyncio.to_thread(self.memory.read_deep, agent_id, part, before=before, limit=limit)
        return DeepMemoryPage(items={item.name: item.text for item in view.items}, more=view.more)

    async def close(self) -> None:
        """Nothing is open between reads."""


class _Layer1(pydantic.BaseModel):
    """The answer of GET /memory/{agent}/read, as far as a step needs it."""

    agent_id: str
    mode: ReadMode
    version: int = pydantic.Field(ge=0)
    commit: str | None
    files: dict[str, str]
    token_count: int = pydantic.Field(ge=0)


class _Layer2Piece(pydantic.BaseModel):
    name: str
    text: str


class _Layer2(pydantic.BaseModel):
    """The answer of GET /memory/{agent}/deep."""

    items: list[_Layer2Piece]
    next_cursor: str | None


@dataclass(kw_only=True, slots=True)
class GatewayReader:
    """Reads through the gateway at `url`. Each read is one request; nothing is kept.

    The matrix of authority gives Layer 1 to the orchestrator, and Layer 2 to the runtime of that agent alone. So there are
    two tokens: `token()`, and `deep_token(agent_id)`. Both raise KeyUnusable.
    """

    url: str
    token: Callable[[], str]
    deep_token: Callable[[str], str]
    tls: ssl.SSLContext | None = None
    _client: ComponentClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = ComponentClient(url=self.url, tls=self.tls, answer_bytes_max=ANSWER_BYTES_MAX, answer_s=ANSWER_S)

    async def read(self, agent_id: str, mode: ReadMode) -> MemoryView:
        answer = await self._get(agent_id, "read", {"mode": mode.value}, self.token)
        layer1 = self._parsed(_Layer1, answer)
        if (layer1.agent_id, layer1.mode) != (agent_id, mode):
            raise self._unavailable(f"it answered about {layer1.agent_id[:DETAIL_CHARS_MAX]}")
        return MemoryView(
            agent_id=AgentId(layer1.agent_id),
            mode=mode,
            version=layer1.version,
            commit=None if layer1.commit is None else CommitId(layer1.commit),
            content=layer1.files,
            token_count=layer1.token_count,
        )

    async def read_deep(self, agent_id: str, part: DeepPart, *, before: str | None, limit: int) -> DeepMemoryPage:
        query = {"part": part.value, "limit": str(limit), **({} if before is None else {"cursor": before})}
        layer2 = self._parsed(_Layer2, await self._get(agent_id, "deep", query, partial(self.deep_token, agent_id)))
        return DeepMemoryPage(items={item.name: item.text for item in layer2.items}, more=layer2.next_cursor)

    async def close(self) -> None:
        await self._client.close()

    async def _get(self, agent_id: str, what: str, query: dict[str, str], token: Callable[[], str]) -> bytes:
        path = f"/memory/{quote(checked_agent_id(agent_id), safe='')}/{what}?{urlencode(query)}"
        try:
            headers = {"authorization": f"Bearer {token()}"}
            with tracing.span("memory.GET", {"trellis.agent": agent_id}, kind=tracing.CLIENT):
                answer = await self._client.send("GET", path, headers=headers | tracing.headers())
        except KeyUnusable as error:
            raise MemoryRefused(url=self.url, agent_id=agent_id, reason=str(error.data["reason"])) from error
        except OutgoingError as error:
            raise self._unavailable(str(error)) from error
        return answer.body if answer.status == 200 else self._refuse(agent_id, answer)

    def _refuse(self, agent_id: str, answer: FetchedResponse) -> NoReturn:
        reason = f"it answered {answer.status}{problem_detail(answer.body, DETAIL_CHARS_MAX)}"
        if answer.status in WORTH_ANOTHER_TRY or not 400 <= answer.status < 500:
            raise self._unavailable(reason)
        problem = problem_fields(answer.body)
        if isinstance(tokens := problem.get("tokens"), int) and isinstance(limit := problem.get("limit"), int):
            raise MemoryOverLimit(what=problem.get("what"), agent_id=agent_id, tokens=tokens, limit=limit)
        if answer.status in CREDENTIAL_STATUSES:
            reason += "; this process needs a token with the role orchestrator, and a key that signs for its agents"
        raise MemoryRefused(url=self.url, agent_id=agent_id, reason=reason)

    def _parsed(self, shape: type[ShapeT], body: bytes) -> ShapeT:
        try:
            return read_shape(shape, body)
        except AnswerUnreadable as error:
            raise self._unavailable(f"its answer cannot be read: {error}") from None

    def _unavailable(self, reason: str) -> MemoryUnavailable:
        return MemoryUnavailable(reason=f"the gateway at {self.url}: {reason}")
