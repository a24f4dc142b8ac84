"""Sign-in of the console: a code of the link that `trellis up` printed becomes a token."""

from typing import Annotated

import pydantic
from fastapi import APIRouter, Request

from trellis.gateway.callers import InstanceOf
from trellis.gateway.sign_in import CODE_CHARS_MAX, SignInCodes
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS, Problem

router = APIRouter(tags=["system"], route_class=StrictRoute)


class SignInRequest(pydantic.BaseModel):
    """The code of a sign-in link."""

    model_config = body_config({"code": "the-code-of-the-link"})

    code: Annotated[str, pydantic.Field(min_length=1, max_length=CODE_CHARS_MAX)]


class SignedIn(pydantic.BaseModel):
    """A token for the `Authorization` header."""

    token: str


@router.post("/sign-in", responses=PROBLEMS)
async def sign_in(body: SignInRequest, request: Request, instance: InstanceOf) -> SignedIn:
    """Exchange the code of a sign-in link for a token. A code works once.

    Only a gateway that runs with its development key, on this machine alone, makes such links: `trellis up` prints one.
    """
    codes: SignInCodes | None = request.app.state.sign_in
    if codes is None:
        detail = "This gateway makes no sign-in links; paste a token of `trellis token issue`."
        raise Problem("NOT_FOUND", detail)
    return SignedIn(token=await codes.exchange(body.code, instance.ledger))
