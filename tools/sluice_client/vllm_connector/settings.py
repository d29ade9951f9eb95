"""The settings of the connector: kv_connector_extra_config of vLLM, and kv_transfer_params of a request."""

from dataclasses import dataclass
from typing import ClassVar

from sluice_client.hand_off import settings as shared
from sluice_client.hand_off.settings import Wish

# Routers of other connectors put these into a request; they say nothing to this one.
_FOREIGN = {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_request_id", "tp_size"}


@dataclass(frozen=True)
class Settings(shared.Settings):
    """How the connector hands prompts over. A prompt that finds no room in time is computed without a hand-off."""

    WHERE: ClassVar[str] = "kv_connector_extra_config"

    # Which requests are handed over: those that say "do_remote_decode": true, or, with "all", every one that does not
    # say false. The gateway smg says nothing to a connector that it does not know.
    hand_over: str = "asked"
    # "push" sends each prompt to a decode node while it is computed. "hold" keeps it, and the decode node that the router
    # chooses reads it: for several decode nodes behind a router that does not read `decode` in an answer.
    mode: str = "push"
    # With "hold": where decode nodes read, and under which address they find it (default: `listen`).
    listen: str = ""
    advertise: str = ""
    # How long a prompt is held for a reader.
    hold_seconds: float = 60.0


def read_settings(extra: dict) -> Settings:
    """Returns the settings of `extra`, and makes its credentials those of this process. Raises ValueError by name."""
    settings = shared.parse(Settings, extra)
    where = settings.WHERE
    if settings.hand_over not in ("asked", "all"):
        raise ValueError(f'{where}.hand_over: expected "asked" or "all", found {settings.hand_over!r}')
    if settings.mode not in ("push", "hold"):
        raise ValueError(f'{where}.mode: expected "push" or "hold", found {settings.mode!r}')
    if settings.mode == "hold" and not settings.listen:
        raise ValueError(f'{where}.listen: expected host:port, at which decode nodes read, with mode "hold"')
    if settings.ca and settings.mode == "hold" and not settings.cert:
        raise ValueError(f'{where}.cert: expected, with key, beside ca and mode "hold"')
    shared.check_least(settings, "hold_seconds", 1)
    shared.use(settings, *filter(None, (settings.listen, settings.advertise)))
    return settings


def read_wish(params: dict | None, settings: Settings) -> Wish | None:
    """Returns what a request's kv_transfer_params ask for, or None if it is not to be handed over.

    Raises ValueError, which names the field.
    """
    params = params or {}
    if not params.get("do_remote_decode", settings.hand_over == "all"):
        return None
    given = {k: v for k, v in params.items() if k not in _FOREIGN and v is not None}
    for flag in ("do_remote_decode", "do_remote_prefill"):
        if not isinstance(given.pop(flag, False), bool):
            raise ValueError(f"kv_transfer_params.{flag}: expected true or false")
    if params.get("do_remote_prefill"):
        raise ValueError("kv_transfer_params.do_remote_prefill: this is a prefill node, which takes no caches")
    return shared.wish_of(given, settings, "kv_transfer_params")
