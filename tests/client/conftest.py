import contextlib
import io
import subprocess

import pytest
from sluice_client import cli


@pytest.fixture
def node():
    from fake_node import FakeNode
    fake = FakeNode()
    yield fake
    fake.cancelled.set()
    fake.server.stop(None)


@pytest.fixture(autouse=True)
def no_nodes_in_the_environment(monkeypatch):
    for name in ("SLUICE_DECODE", "SLUICE_PREFILL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sluice(monkeypatch):
    """sluice(*args, input="") runs tools/sluice in this process and returns what subprocess.run would."""
    def run(*args, input=""):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = cli.main([str(arg) for arg in args])
            except SystemExit as exit_:  # argparse's
                status = exit_.code or 0
        return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())
    return run


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """A directory with a tokenizer that has one token for each byte, so that characters come in halves."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    directory = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{% for m in messages %}'
        '[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"}')
    return directory
