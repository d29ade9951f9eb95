#!/usr/bin/env python3
"""Measures how many drafts of `--speculation ngram` a model accepts, and the tokens that a step then gives.

    .venv/bin/python tests/bench/acceptance.py                     # SmolLM2, 1, 3, 5 and 8 drafts
    .venv/bin/python tests/bench/acceptance.py --tokens 3 --temperature 0.7

Each value of --tokens gets its own node, which answers prompts of several kinds, one at a time: questions, whose
answers repeat little of them; texts to copy with a change, to summarise or to pick facts from; and code to change.
Every answer is held to the answer without speculation. A sequence's steps are its tokens less the accepted drafts, so
tokens/step is the most by which speculation can be faster. Neither depends on the machine's speed.
"""

import argparse
import tempfile
from pathlib import Path

from loaded_node import Verdict  # makes the folder of the next ones known
from sluice.v1 import decode_pb2
from sluice_client.text import Text
from support.nodes import SMOLLM2, TIMEOUT_S, Node, greedy, tokens_of

STORY = ("The lighthouse at Penmarch was built in 1897 by the engineer Armand Rousseau. Its tower is 65 metres high and "
         "made of granite from Kersanton. The lamp was first lit with oil, then with gas, and since 1948 with "
         "electricity. On a clear night its light can be seen from 60 kilometres away. The keeper, Yann Le Goff, lived "
         "there with his wife and three children until 1974, when the light was automated. Today the tower is a museum, "
         "and visitors climb its 307 steps to look over the bay.")
CODE = '''def read_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            name, count, price = line.strip().split(",")
            orders.append({"name": name, "count": int(count), "price": float(price)})
    return orders


def total_of(orders):
    total = 0.0
    for order in orders:
        total += order["count"] * order["price"]
    return total
'''
KINDS = {
    "questions": ["Why is the sky blue?", "Explain how a bicycle stays upright.", "Write a short poem about the sea.",
                  "What should I pack for a week of hiking in the mountains?"],
    "facts from a text": [f"{STORY}\n\nWho was the keeper, and until when did he live there?",
                          f"{STORY}\n\nList every number of the text with what it counts.",
                          f"{STORY}\n\nWrite the facts of the text as a list with one fact on each line."],
    "summaries": [f"Summarise this text in three sentences.\n\n{STORY}",
                  f"Retell this text for a child.\n\n{STORY}"],
    "copies": [f"Repeat this text word by word.\n\n{STORY}",
               f"Correct any mistake in this text, and write all of it again.\n\n{STORY}"],
    "code": [f"Rename total_of to order_total, and write all of the code again.\n\n{CODE}",
             f"Add a function that returns the most expensive order to this code, and write all of it.\n\n{CODE}"],
}


def arguments() -> argparse.Namespace:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--model", type=Path, default=SMOLLM2, help="model, with a chat template (default: %(default)s)")
    out.add_argument("--tokens", default="1,3,5,8", help="speculation_tokens, with commas (default: %(default)s)")
    out.add_argument("--max-tokens", type=int, default=200, help="tokens of an answer (default: %(default)s)")
    out.add_argument("--temperature", type=float, default=0, help="temperature, with a seed (default: %(default)s)")
    return out.parse_args()


def answers(args, prompts: dict[str, list[list[int]]], *flags: str):
    """Returns the tokens and the usage of each prompt's answer, by kind."""
    with tempfile.TemporaryDirectory(prefix="sluice-acceptance-") as folder:
        node = Node("sluice-server", args.model, Path(folder), "--hbm-bytes", "256MiB", "--dram-bytes", "64MiB",
                    "--max-sequences", "4", "--local-prefill", "always", *flags)
        sampling = greedy(max_tokens=args.max_tokens)
        sampling.temperature = args.temperature
        sampling.seed = 1
        found = {}
        for kind, all_ids in prompts.items():
            for ids in all_ids:
                request = decode_pb2.GenerateRequest(prompt_token_ids=ids, sampling=sampling)
                tokens, finish = tokens_of(node.decode.Generate(request, timeout=10 * TIMEOUT_S))
                found.setdefault(kind, []).append((list(tokens), finish.usage))
        node.stop()
    return found


def main() -> int:
    args = arguments()
    text = Text(args.model)
    prompts = {kind: [text.encode_chat([{"role": "user", "content": prompt}]) for prompt in of_kind]
               for kind, of_kind in KINDS.items()}
    verdict = Verdict()
    plain = answers(args, prompts)
    print("| drafts | kind | tokens | drafted | accepted | tokens/step |\n| --- | --- | --- | --- | --- | --- |")
    for count in args.tokens.split(","):
        found = answers(args, prompts, "--speculation", "ngram", "--speculation-tokens", count,
                        "--speculation-adaptive=false")
        all_tokens = all_accepted = same = 0
        for kind, got in found.items():
            same += sum(ids == want for (ids, _), (want, _) in zip(got, plain[kind]))
            tokens = sum(len(ids) for ids, _ in got)
            drafted = sum(usage.drafted_tokens for _, usage in got)
            accepted = sum(usage.accepted_tokens for _, usage in got)
            share = f"{accepted} ({accepted / drafted:.0%})" if drafted else "0"
            print(f"| {count} | {kind} | {tokens} | {drafted} | {share} | {tokens / (tokens - accepted):.2f} |")
            all_tokens += tokens
            all_accepted += accepted
        print(f"| {count} | all | {all_tokens} | | {all_accepted} | {all_tokens / (all_tokens - all_accepted):.2f} |",
              flush=True)
        asked = sum(len(of_kind) for of_kind in prompts.values())
        verdict.hold(f"{count} drafts, answers that are those without speculation", f"{same} of {asked}", same == asked)
    return verdict.status()


if __name__ == "__main__":
    raise SystemExit(main())
