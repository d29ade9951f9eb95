"""tools/sluice chat with real nodes: a conversation that the decode node keeps is the one that is sent whole."""

from support.nodes import SLUICE, run

MESSAGES = "Name a colour.\nName another one.\nWhich was the first?\n"


def chat(pair, model, *flags):
    done = run(SLUICE, "chat", *pair.flags(), "--tokenizer", model, "--max-tokens", 16, "--verbose", *flags,
               input=MESSAGES)
    assert done.returncode == 0, done.stderr
    return done


def test_a_kept_conversation_gives_the_answers_of_one_that_is_sent_whole(smollm2_pairs, smollm2):
    pair = smollm2_pairs("float32")
    before = pair.decode.settled()
    kept, whole = chat(pair, smollm2), chat(pair, smollm2, "--keep", 0)
    assert kept.stdout == whole.stdout and len(kept.stdout.strip().splitlines()) >= 3
    assert kept.stderr.count("sent the whole conversation") == 1 and kept.stderr.count("new tokens; the node kept") == 2
    assert whole.stderr.count("sent the whole conversation") == 3
    pair.decode.wait_until_held(before)  # the last one was given back


def test_a_node_whose_lease_is_shorter_is_sent_the_whole_conversation(smollm2, start):
    decode = start("sluice-server", smollm2, "--hbm-bytes", "256MiB", "--dram-bytes", "256MiB", "--lease-seconds",
                   "5s", "--local-prefill", "always")
    done = run(SLUICE, "chat", "--decode", decode.address, "--tokenizer", smollm2, "--max-tokens", 4, "--verbose",
               input=MESSAGES)
    assert done.returncode == 0, done.stderr
    assert "give a shorter --keep" in done.stderr and done.stderr.count("sent the whole conversation") == 3
