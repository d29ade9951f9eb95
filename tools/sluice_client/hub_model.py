"""Downloads a model from huggingface.co, or from the mirror that HF_ENDPOINT names."""

import sys
from pathlib import Path

from sluice_client.errors import ToolError

# The files that Sluice, its client and the gateway read. Everything else in a repository stays there.
_PATTERNS = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
             "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]


def fetch(name: str, revision: str | None, directory: Path, force: bool) -> None:
    """Downloads the model `name` (OWNER/NAME) into `directory`. Files that are complete already stay, unless `force`.

    Raises ToolError where there is no such model, no access to it, no network, or nothing in it to load.
    """
    import httpx2
    from huggingface_hub import HfApi, constants, errors, snapshot_download, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    at = f"{name} at {constants.ENDPOINT}"
    try:
        # Asked first: snapshot_download() takes any files in `directory` for the model where it gets no answer.
        commit = HfApi().model_info(name, revision=revision).sha
        snapshot_download(name, revision=commit, local_dir=directory, allow_patterns=_PATTERNS,
                          force_download=force)
    except errors.GatedRepoError as error:
        raise ToolError(f"{at} is gated: accept its terms on its page, then run this again with your token in "
                        "HF_TOKEN (or after `hf auth login`)") from error
    except errors.RevisionNotFoundError as error:
        raise ToolError(f"{at} has no revision '{revision}'") from error
    except errors.RepositoryNotFoundError as error:
        raise ToolError(f"there is no model {at}, or it is private: check its name, or give a token that may read "
                        "it in HF_TOKEN") from error
    except errors.HFValidationError as error:
        raise ToolError(f"'{name}' is not the id of a model (OWNER/NAME): {error}") from error
    except errors.HfHubHTTPError as error:
        raise ToolError(f"cannot download {at}: {_one_line(error)}") from error
    except (errors.IncompleteSnapshotError, httpx2.HTTPError, OSError) as error:
        raise ToolError(f"cannot reach {at}: {_one_line(error)}\n"
                        "Without a network: download the model's directory elsewhere "
                        f"(hf download {name} --local-dir DIR), copy it here, and give it as --model DIR") from error
    missing = [what for what, pattern in (("config.json", "config.json"), ("safetensors weights", "*.safetensors"))
               if not any(directory.glob(pattern))]
    if missing:
        raise ToolError(f"{at} has no {' and no '.join(missing)}: Sluice cannot load it")


def _one_line(error: Exception) -> str:
    """Returns the innermost cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
