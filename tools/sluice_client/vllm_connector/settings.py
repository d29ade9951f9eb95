"""The settings of the connector: kv_connector_extra_config of vLLM, and kv_transfer_params of a request."""

from dataclasses import dataclass, fields

from sluice_client import rpc
from sluice_client.errors import ToolError

# The name by which vLLM, the gateway and the decode node know the connector.
CONNECTOR = "SluiceConnector"
_WHERE = "kv_connector_extra_config"
# Routers of other connectors put these into a request; they say nothing to this one.
_FOREIGN = {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_request_id", "tp_size"}


@dataclass(frozen=True)
class Settings:
    """How the connector hands prompts over. A field has the name of its key."""

    # The decode node's host:port; several are separated by commas. A request may name one of them, else the first has it.
    decode: tuple[str, ...]
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
    # Output tokens for which the decode node reserves room, where a request does not say.
    max_new_tokens: int = 1024
    # How long a prompt waits for room at the decode node before vLLM computes it without a hand-off.
    reserve_seconds: float = 30.0
    # Streams of one prompt from each rank.
    streams: int = 1
    # The tenant to whom transfers belong, where a request does not say.
    tenant: str = ""
    # The model's fingerprint, as the decode node shows it. Empty: shapes alone are compared.
    fingerprint: str = ""
    # PEM files and @FILE of a token, as for tools/sluice. Empty: no encryption.
    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""


def read_settings(extra: dict) -> Settings:
    """Returns the settings of `extra`, and makes its credentials those of this process. Raises ValueError by name."""
    known = {f.name: f for f in fields(Settings)}
    for name in extra:
        if name not in known:
            raise ValueError(f"{_WHERE}.{name}: is not known; there are {', '.join(known)}")
    given = dict(extra)
    decode = given.pop("decode", "")
    if not isinstance(decode, str) or not decode:
        raise ValueError(f"{_WHERE}.decode: expected the decode node's host:port, found {decode!r}")
    for name, value in given.items():
        kind = known[name].type
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{_WHERE}.{name}: expected {kind.__name__}, found {value!r}")
    settings = Settings(tuple(part.strip() for part in decode.split(",")), **given)
    if settings.hand_over not in ("asked", "all"):
        raise ValueError(f'{_WHERE}.hand_over: expected "asked" or "all", found {settings.hand_over!r}')
    if settings.mode not in ("push", "hold"):
        raise ValueError(f'{_WHERE}.mode: expected "push" or "hold", found {settings.mode!r}')
    if settings.mode == "hold" and not settings.listen:
        raise ValueError(f'{_WHERE}.listen: expected host:port, at which decode nodes read, with mode "hold"')
    if settings.ca and settings.mode == "hold" and not settings.cert:
        raise ValueError(f'{_WHERE}.cert: expected, with key, beside ca and mode "hold"')
    for name, least in (("max_new_tokens", 1), ("streams", 1), ("reserve_seconds", 0), ("hold_seconds", 1)):
        if getattr(settings, name) < least:
            raise ValueError(f"{_WHERE}.{name}: expected at least {least}, found {getattr(settings, name)}")
    try:
        rpc.use(rpc.credentials_from(settings.ca, settings.cert, settings.key, settings.token))
        for address in (*settings.decode, *filter(None, (settings.listen, settings.advertise))):
            rpc.open_channel(address).close()
    except ToolError as error:
        raise ValueError(f"{_WHERE}: {error}") from None
    return settings


@dataclass(frozen=True)
class Wish:
    """What a request asks of the connector."""

    decode: str
    max_new_tokens: int
    tenant: str
    rendezvous_key: str = ""


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
    decode = given.pop("decode", settings.decode[0])
    if decode not in settings.decode:
        raise ValueError(f"kv_transfer_params.decode: {decode!r} is none of {', '.join(settings.decode)}")
    tokens = given.pop("max_new_tokens", settings.max_new_tokens)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"kv_transfer_params.max_new_tokens: expected a number of at least 1, found {tokens!r}")
    words = {name: given.pop(name, default)
             for name, default in (("tenant", settings.tenant), ("rendezvous_key", ""))}
    for name, value in words.items():
        if not isinstance(value, str):
            raise ValueError(f"kv_transfer_params.{name}: expected text, found {value!r}")
    if given:
        raise ValueError(f"kv_transfer_params.{next(iter(given))}: is not known to {CONNECTOR}")
    return Wish(decode, tokens, **words)
