"""The settings of the sender: the environment's SGLANG_SLUICE, and a request's sampling parameter custom_params.sluice."""

import json
import os
from dataclasses import dataclass
from typing import ClassVar

from sluice_client.hand_off import settings as shared
from sluice_client.hand_off.settings import Wish

VARIABLE = "SGLANG_SLUICE"


@dataclass(frozen=True)
class Settings(shared.Settings):
    """How the sender hands prompts over. A prompt that finds no room in time fails."""

    WHERE: ClassVar[str] = VARIABLE


def read_settings(text: str | None = None) -> Settings:
    """Returns the settings of a JSON object, by default the environment's, and makes its credentials those of this
    process. Raises ValueError by name.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    try:
        extra = json.loads(text)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f'{VARIABLE}: expected a JSON object such as {{"decode": "127.0.0.1:7000"}}, found {text!r}')
    settings = shared.parse(Settings, extra)
    shared.use(settings)
    return settings


def read_wish(req, settings: Settings) -> Wish:
    """Returns what a request of SGLang asks for. Raises ValueError, which names the field."""
    sampling = req.sampling_params
    params = (getattr(sampling, "custom_params", None) or {}).get("sluice") or {}
    if not isinstance(params, dict):
        raise ValueError(f"custom_params.sluice: expected an object, found {params!r}")
    room = req.bootstrap_room
    return shared.wish_of(params, settings, "custom_params.sluice", max_new_tokens=sampling.max_new_tokens,
                          rendezvous_key="" if room is None else str(room))
