"""Converts between text and token ids: the tokenizer, the chat template, and text that comes token by token."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_client.errors import ToolError

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream


class Text:
    """The tokenizer and the chat template of a Hugging Face directory."""

    def __init__(self, directory: str | Path):
        """Reads tokenizer.json and, if there, tokenizer_config.json and chat_template.jinja."""
        from tokenizers import Tokenizer

        self._directory = Path(directory)
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise ToolError(f"no tokenizer.json in {self._directory}: --tokenizer takes the model's "
                            "Hugging Face directory")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself.
            raise ToolError(f"{path} is not a tokenizer: {error}") from error
        self._config = self._read_config()

    def _read_config(self) -> dict:
        path = self._directory / "tokenizer_config.json"
        try:
            return json.loads(path.read_text()) if path.is_file() else {}
        except ValueError as error:
            raise ToolError(f"{path} is not JSON: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with the special tokens that the tokenizer itself puts around it."""
        return self._tokenizer.encode(text).ids

    def encode_plain(self, text: str) -> list[int]:
        """Returns the ids of a text as it is; special tokens are only those that the text names."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Returns the ids of [{"role": "user", "content": "..."}, ...] up to where the assistant's answer begins."""
        return self.encode_plain(self.render_chat(messages))

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message):
            raise TemplateError(message)

        # The environment is set up like that of transformers, because templates are written for it.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._template()).render(
                messages=messages, add_generation_prompt=True, **self._special_tokens())
        except TemplateError as error:
            raise ToolError(f"the chat template of {self._directory} failed: {error}") from error

    def _template(self) -> str:
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text()
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several templates with names
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not template:
            raise ToolError(f"{self._directory} has no chat template (chat_template.jinja, or "
                            "chat_template in tokenizer_config.json): leave --chat out")
        return template

    def _special_tokens(self) -> dict[str, str]:
        """Returns bos_token, eos_token, ..., by the names that templates use."""
        found = {}
        for key, value in self._config.items():
            if key.endswith("_token") and isinstance(value, (str, dict)):
                found[key] = value if isinstance(value, str) else value.get("content", "")
        return found

    def decode(self, ids: list[int]) -> str:
        """Returns the text of `ids` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def decode_with_special(self, ids: list[int]) -> str:
        """Returns the text of `ids` with special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def decode_stream(self) -> "DecodeStream":
        """Returns the state of a text that is decoded token by token, by step()."""
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=True)

    def step(self, stream: "DecodeStream", token_id: int) -> str | None:
        """Returns what the token completes, or None where a character is incomplete."""
        return stream.step(self._tokenizer, token_id)


class IncrementalDecoder:
    """Decodes tokens as they come; no piece ends in half a character, and special tokens are left out."""

    def __init__(self, text: Text):
        self._text = text
        self._stream = text.decode_stream()
        # Ids since the last piece. At the end an incomplete character is decoded from them.
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        """Returns the text that is complete now, which may be empty."""
        self._held.append(token_id)
        piece = self._text.step(self._stream, token_id)
        if piece is None:
            return ""
        self._held.clear()
        return piece

    def finish(self) -> str:
        """Returns what was held back, with U+FFFD for bytes that are no character."""
        held, self._held = self._held, []
        return self._text.decode(held)


class StopFilter:
    """Cuts a text that comes in pieces at the first stop string, which may straddle pieces."""

    def __init__(self, stops: list[str]):
        self._stops = [s for s in stops if s]
        self._held = ""
        self._stopped = False

    def add(self, piece: str) -> str:
        """Returns the text that surely comes before any stop string."""
        if self._stopped:
            return ""
        self._held += piece
        found = [at for at in (self._held.find(s) for s in self._stops) if at >= 0]
        if found:
            self._stopped = True
            said, self._held = self._held[:min(found)], ""
            return said
        keep = max((_overlap(self._held, s) for s in self._stops), default=0)
        cut = len(self._held) - keep
        said, self._held = self._held[:cut], self._held[cut:]
        return said

    def finish(self) -> str:
        said, self._held = self._held, ""
        return said


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
