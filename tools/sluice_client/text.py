"""Between text and token ids: the tokenizer, the chat template, and text that comes token by token."""

import json
from datetime import datetime
from pathlib import Path

from sluice_client.errors import ToolError

# What decoding puts where bytes are not (yet) a character.
_REPLACEMENT = "\ufffd"


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
        """Plain text, with the special tokens that the tokenizer itself puts around it."""
        return self._tokenizer.encode(text).ids

    def encode_plain(self, text: str) -> list[int]:
        """Text as it is, special tokens only where it has them."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """[{"role": "user", "content": "..."}, ...] up to where the assistant's answer begins."""
        return self.encode_plain(self.render_chat(messages))

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message):
            raise TemplateError(message)

        # As transformers sets its environment up, since templates are written against that.
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
        if isinstance(template, list):  # Several, by name.
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not template:
            raise ToolError(f"{self._directory} has no chat template (chat_template.jinja, or "
                            "chat_template in tokenizer_config.json): leave --chat out")
        return template

    def _special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... as templates name them."""
        found = {}
        for key, value in self._config.items():
            if key.endswith("_token") and isinstance(value, (str, dict)):
                found[key] = value if isinstance(value, str) else value.get("content", "")
        return found

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class IncrementalDecoder:
    """Text as its tokens come, never half a character.

    Decodes the last few tokens again with each new one, because what a token adds may depend on the
    one before it, and holds back what ends in an incomplete character.
    """

    def __init__(self, text: Text):
        self._text = text
        self._ids: list[int] = []
        # ids[context:read] is said and gives context; ids[read:] is not said yet.
        self._context = 0
        self._read = 0

    def add(self, token_id: int) -> str:
        """What can be said now: maybe nothing."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        said = self._text.decode(self._ids[self._context:self._read])
        now = self._text.decode(self._ids[self._context:])
        if len(now) <= len(said) or (now.endswith(_REPLACEMENT) and not final):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return now[len(said):]


class StopFilter:
    """Cuts a text that comes in pieces at the first stop string, which may straddle pieces."""

    def __init__(self, stops: list[str]):
        self._stops = [s for s in stops if s]
        self._held = ""
        self._stopped = False

    def add(self, piece: str) -> str:
        """What is surely before any stop string."""
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
    """Length of the longest end of `text` that begins `stop`, less than all of it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
