"""Opens what answers grounded questions in this process, from its settings."""

from pydantic import SecretStr

from trellis.app.fleet import reachable_host
from trellis.app.settings import Settings
from trellis.app.wiring import check_destination, lazy_token, outgoing_tls
from trellis.engine.clock import Clock
from trellis.engine.errors import SettingsInvalid
from trellis.lifecycles import Role
from trellis.nlm.open import ASKS_BACKEND, DEFAULT, open_provider
from trellis.nlm.provider import NlmProvider


def nlm_address(settings: Settings) -> str:
    """Returns the URL of the NLM backend: the configured one, else this machine's."""
    there = f"http://{reachable_host(settings.nlm_host)}:{settings.nlm_port}"
    return (settings.nlm_backend or there).rstrip("/")


def open_settings_provider(settings: Settings, *, clock: Clock, ledger: str | None) -> NlmProvider:
    """Opens the NLM provider of the settings. `ledger` is the ledger whose keys sign the tokens of this process.

    None is for the NLM backend, which cannot ask itself. Raises SettingsInvalid.
    """
    if settings.nlm == ASKS_BACKEND:
        if ledger is None:
            detail = "the NLM backend cannot ask itself: choose the provider that it asks, such as extractive or openai"
            raise SettingsInvalid(source=settings.source_of("nlm"), detail=detail)
        from trellis.nlm.backend import BackendProvider  # few processes need it

        check_destination(settings, "nlm_backend", nlm_address(settings))
        token = lazy_token(ledger, settings, Role.ORCHESTRATOR)
        return BackendProvider(nlm_address(settings), token, outgoing_tls(settings))
    return open_provider(
        settings.nlm,
        clock=clock,
        base_url=settings.nlm_base_url,
        model=settings.nlm_model,
        key=_key(settings),
    )


def _key(settings: Settings) -> SecretStr | None:
    """The key for the NLM provider's server; None for the default provider, which calls no server.

    Raises SettingsInvalid if the key may not be sent there.
    """
    return None if settings.nlm == DEFAULT else settings.key_for("nlm_base_url")
