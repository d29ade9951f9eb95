#!/usr/bin/env python3
"""Kills ranks of a node in the middle of their steps, again and again, and looks at what its callers get.

    .venv/bin/python tests/bench/ranks_killed.py                   # 20 times, a tiny model
    .venv/bin/python tests/bench/ranks_killed.py --model configs/models/topic-drift-small --dummy

Two ranks divide a model, and streams of known greedy answers decode. At a random moment one rank gets SIGKILL: rank 1 and
rank 0 in turn. Every stream must end with UNAVAILABLE within --end-seconds, the reason being RANK_LOST where rank 0
lives to say so; what a stream had until then must be the begin of its answer; and the other rank's process must end. Then
the group is started anew. The last group answers once more to the end. The exit status is 1 if any of that fails. The
report is written after every kill.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from loaded_node import ROOT  # makes the folder of the next ones known

import grpc  # noqa: E402
from sluice.v1 import decode_pb2  # noqa: E402
from sluice_client import rpc  # noqa: E402
from support.nodes import BIN, DEVICE, TIMEOUT_S, greedy, run  # noqa: E402
from support.rank_lab import FLUSH_S, Ranks  # noqa: E402

RANKS = 2


def arguments() -> argparse.Namespace:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--kills", type=int, default=20, help="ranks that are killed (default: %(default)s)")
    out.add_argument("--streams", type=int, default=4, help="streams that decode at once (default: %(default)s)")
    out.add_argument("--tokens", type=int, default=1500, help="tokens of an answer (default: %(default)s)")
    out.add_argument("--model", type=Path, help="model directory (default: a tiny model, made for the run)")
    out.add_argument("--dummy", action="store_true", help="make the model's weights by formula")
    out.add_argument("--end-seconds", type=float, default=5, help="time for streams to end (default: %(default)s)")
    out.add_argument("--seconds", type=float, default=420, help="time for all of it (default: %(default)s)")
    out.add_argument("--seed", type=int, default=1, help="of the moments of the kills (default: %(default)s)")
    out.add_argument("--json", type=Path, help="write the report there")
    return out.parse_args()


class Stream:
    """One answer, read by a thread: its tokens, its error and when it ended."""

    def __init__(self, node, prompt: list[int], tokens: int):
        self.tokens: list[int] = []
        self.error: grpc.RpcError | None = None
        self.ended = 0.0
        self.first = threading.Event()
        self._call = node.decode.Generate(
            decode_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=tokens, ignore_eos=True)),
            timeout=TIMEOUT_S)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for message in self._call:
                self.tokens.extend(token.id for token in message.tokens)
                self.first.set()
        except grpc.RpcError as error:
            self.error = error
        self.ended = time.monotonic()
        self.first.set()

    def join(self, seconds: float | None = None) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def prompt_of(number: int) -> list[int]:
    return [(7 * i * (number + 1) + 3) % 500 for i in range(1 + 23 * number)]


class Rounds:
    def __init__(self, args: argparse.Namespace, model: Path, folder: Path):
        self.args, self.model, self.folder = args, model, folder
        self.random = random.Random(args.seed)
        self.starts: list[float] = []
        self.wrong: list[str] = []
        self.kills: list[dict] = []
        self.node = self.start()
        # Their first answers are computed twice, since the first run also warms up.
        self.expected, _ = self.answers()
        again, self.answer_s = self.answers()
        if again != self.expected:
            self.wrong.append("the undisturbed group gave two answers to one prompt")

    def start(self) -> Ranks:
        folder = self.folder / str(len(self.starts))
        folder.mkdir()
        begin = time.monotonic()
        flags = ["--local-prefill", "always", *(["--load-format", "dummy"] if self.args.dummy else [])]
        node = Ranks(self.model, folder, RANKS, *flags, hbm="1GiB" if DEVICE == "cuda" else "128MiB")
        self.starts.append(time.monotonic() - begin)
        return node

    def streams(self) -> list[Stream]:
        return [Stream(self.node.leader, prompt_of(i), self.args.tokens) for i in range(self.args.streams)]

    def answers(self) -> tuple[list[list[int]], float]:
        begin, running = time.monotonic(), self.streams()
        for stream in running:
            stream.join()
            if stream.error is not None:
                raise SystemExit(f"ranks_killed: an undisturbed stream ended: {stream.error.details()}\n"
                                 f"{self.node.leader.tail()}")
        return [stream.tokens for stream in running], time.monotonic() - begin

    def kill_one(self, number: int) -> None:
        victim = (number + 1) % RANKS
        after = self.random.uniform(0.02, 0.7) * self.answer_s
        running = self.streams()
        for stream in running:
            stream.first.wait()
        time.sleep(after)
        process = self.node.processes()[victim]
        was_running = [not stream.join(0) for stream in running]
        begin = time.monotonic()
        process.kill()
        problems = []
        for i, stream in enumerate(running):
            ended = stream.join(max(0.0, begin + self.args.end_seconds - time.monotonic()))
            if not ended:
                problems.append(f"stream {i} had not ended after {self.args.end_seconds} s")
            elif stream.error is None or stream.error.code() != grpc.StatusCode.UNAVAILABLE:
                problems.append(f"stream {i} ended with {stream.error}")
            elif victim != 0 and rpc.reason_of(stream.error) != "RANK_LOST":
                problems.append(f"stream {i} ended with the reason {rpc.reason_of(stream.error)!r}")
            if not was_running[i]:
                problems.append(f"stream {i} had ended before the kill")
            if stream.tokens != self.expected[i][:len(stream.tokens)]:
                problems.append(f"stream {i} has another token than its answer")
        ends = [stream.ended - begin for stream in running if stream.ended]
        try:
            self.node.statuses(seconds=FLUSH_S)
        except subprocess.TimeoutExpired:
            problems.append(f"the other rank had not ended after {FLUSH_S} s")
        self.node.end()
        for stream in running:
            stream.join()
        self.kills.append({"rank": victim, "after_seconds": after, "tokens": [len(s.tokens) for s in running],
                           "end_seconds": max(ends, default=None), "problems": problems})
        self.wrong += [f"kill {number + 1}: {problem}" for problem in problems]
        self.node = self.start()
        print(f"kill {number + 1:3} of rank {victim} after {after:5.2f} s and {min(map(len, (s.tokens for s in running)))} "
              f"to {max(map(len, (s.tokens for s in running)))} tokens: streams ended within {max(ends, default=0):.2f} s, "
              f"the group was back in {self.starts[-1]:.1f} s{'; ' + '; '.join(problems) if problems else ''}",
              flush=True)

    def report(self) -> dict:
        ends = {rank: [k["end_seconds"] for k in self.kills if k["rank"] == rank and k["end_seconds"] is not None]
                for rank in range(RANKS)}
        return {"kills": len(self.kills), "wrong": self.wrong, "streams": self.args.streams,
                "tokens_checked": sum(sum(k["tokens"]) for k in self.kills),
                "distinct_tokens": len({t for answer in self.expected for t in answer}),
                "answer_seconds": self.answer_s, "largest_end_seconds": {r: max(e) for r, e in ends.items() if e},
                "start_seconds": self.starts, "each": self.kills}


def main() -> int:
    args = arguments()
    give_up = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="sluice-ranks-") as name:
        folder = Path(name)
        model = args.model
        if model is None:
            model = folder / "tiny-llama"
            model.mkdir()
            done = run(BIN / "sluice-make-fixture", "tiny-llama", model)
            if done.returncode != 0:
                raise SystemExit(done.stderr)
        elif not model.is_absolute() and not model.is_dir():
            model = ROOT / model
        rounds = Rounds(args, model, folder)
        try:
            print(f"{RANKS} ranks of {model.name} on {DEVICE}: {args.streams} streams of {args.tokens} tokens take "
                  f"{rounds.answer_s:.2f} s; the group was there in {rounds.starts[0]:.1f} s", flush=True)
            for number in range(args.kills):
                # A kill takes a start and at most the streams' and the processes' ends.
                if time.monotonic() + rounds.starts[-1] + rounds.answer_s > give_up:
                    rounds.wrong.append(f"there was time for {number} of {args.kills} kills")
                    break
                rounds.kill_one(number)
                if args.json is not None:
                    args.json.write_text(json.dumps(rounds.report(), indent=1) + "\n")
            if rounds.answers()[0] != rounds.expected:
                rounds.wrong.append("the last group does not answer as the first")
        finally:
            rounds.node.end()
        report = rounds.report()
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['kills']} kills; {report['tokens_checked']} tokens before them, of {report['distinct_tokens']} different "
          "ones, all compared; streams ended after at most "
          f"{', '.join(f'{s:.2f} s (rank {r})' for r, s in report['largest_end_seconds'].items())}; "
          f"starts took {min(rounds.starts):.1f} to {max(rounds.starts):.1f} s")
    for problem in report["wrong"]:
        print(f"WRONG  {problem}")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
