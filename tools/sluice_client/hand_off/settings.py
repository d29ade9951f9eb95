"""The settings that the connectors of all engines have, and what a request may ask of them."""

from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from sluice_client import rpc
from sluice_client.errors import ToolError

# The name by which engines, the gateway and the decode node know a connector.
CONNECTOR = "SluiceConnector"


@dataclass(frozen=True)
class Settings:
    """How a connector hands prompts over. A field has the name of its key."""

    # Where an engine's user gives them, for errors.
    WHERE: ClassVar[str] = "settings"

    # The decode node's host:port; several are separated by commas. A request may name one of them, else the first has it.
    decode: tuple[str, ...]
    # Output tokens for which the decode node reserves room, where a request does not say.
    max_new_tokens: int = 1024
    # How long a prompt waits for room at the decode node.
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


_Kind = TypeVar("_Kind", bound=Settings)


def parse(kind: type[_Kind], extra: dict) -> _Kind:
    """Returns the settings of `extra`. Raises ValueError, which names the key."""
    where, known = kind.WHERE, {f.name: f for f in fields(kind)}
    for name in extra:
        if name not in known:
            raise ValueError(f"{where}.{name}: is not known; there are {', '.join(known)}")
    given = dict(extra)
    decode = given.pop("decode", "")
    if not isinstance(decode, str) or not decode:
        raise ValueError(f"{where}.decode: expected the decode node's host:port, found {decode!r}")
    for name, value in given.items():
        expected = known[name].type
        if isinstance(value, bool) or not isinstance(value, (int, float) if expected is float else expected):
            raise ValueError(f"{where}.{name}: expected {expected.__name__}, found {value!r}")
    settings = kind(tuple(part.strip() for part in decode.split(",")), **given)
    for name, least in (("max_new_tokens", 1), ("streams", 1), ("reserve_seconds", 0)):
        check_least(settings, name, least)
    return settings


def check_least(settings: Settings, name: str, least: float) -> None:
    """Raises ValueError if a setting is below `least`."""
    if getattr(settings, name) < least:
        raise ValueError(f"{settings.WHERE}.{name}: expected at least {least}, found {getattr(settings, name)}")


def use(settings: Settings, *addresses: str) -> None:
    """Makes the credentials of `settings` those of this process. Raises ValueError for bad ones and bad addresses."""
    try:
        rpc.use(rpc.credentials_from(settings.ca, settings.cert, settings.key, settings.token))
        for address in (*settings.decode, *addresses):
            rpc.open_channel(address).close()
    except ToolError as error:
        raise ValueError(f"{settings.WHERE}: {error}") from None


@dataclass(frozen=True)
class Wish:
    """What a request asks of the connector."""

    decode: str
    max_new_tokens: int
    tenant: str
    rendezvous_key: str = ""


def wish_of(params: dict, settings: Settings, where: str, *, max_new_tokens: int | None = None,
            rendezvous_key: str = "") -> Wish:
    """Returns what a request's `params` ask for; the keywords stand where it does not say. Raises ValueError, which
    names the field.
    """
    given = dict(params)
    decode = given.pop("decode", settings.decode[0])
    if decode not in settings.decode:
        raise ValueError(f"{where}.decode: {decode!r} is none of {', '.join(settings.decode)}")
    tokens = given.pop("max_new_tokens", max_new_tokens or settings.max_new_tokens)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"{where}.max_new_tokens: expected a number of at least 1, found {tokens!r}")
    words = {name: given.pop(name, default)
             for name, default in (("tenant", settings.tenant), ("rendezvous_key", rendezvous_key))}
    for name, value in words.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}.{name}: expected text, found {value!r}")
    if given:
        raise ValueError(f"{where}.{next(iter(given))}: is not known to {CONNECTOR}")
    return Wish(decode, tokens, **words)
