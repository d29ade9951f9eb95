import pytest


@pytest.fixture
def node():
    from fake_node import FakeNode
    fake = FakeNode()
    yield fake
    fake.cancelled.set()
    fake.server.stop(None)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """A directory whose tokenizer has one token per byte, so that characters come in halves."""
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
