"""Calls of `sluice-bench policies` and `sluice-profile` that the parts of `tools/gpu-test --bench` are made of."""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from sluice_gpu.place import Place

GIB = 1 << 30
LARGE = "configs/models/qwen3-14b"
LLAMA, QWEN8, QWEN25, QWEN7 = (f"configs/models/{name}"
                               for name in ("llama-3-8b", "qwen3-8b", "qwen2.5-14b", "qwen2.5-7b"))
SMALL = "configs/models/topic-drift-small"
WINDOWS = 4  # measured windows of sluice-bench policies
SPARE_TOKENS = 67  # tokens that it decodes before its windows and may decode after them


@dataclass(frozen=True)
class Run:
    """One call of sluice-bench policies."""

    name: str
    policies: tuple[str, ...]
    contexts: tuple[int, ...]
    model: str = LARGE
    batches: tuple[int, ...] = (1,)
    given_batches: bool = False  # runs only `batches`, not the largest batch that fits
    most: int = 16
    # Sequences of the longest context that HBM holds whole; None: HBM for caches is all that is free.
    full_sequences: float | None = 2
    layers: int | None = None  # layers of the model; None means all
    dense_layers: int = 0
    budget: int = 2048
    block_tokens: int = 32
    steps: int = 32
    distinct: int = 2
    statistics: int = 16
    trace: bool = True
    drifts: tuple[float, ...] = ()
    dram_gib: int = 110
    quality: bool = False
    profile: str = ""  # name of an earlier IntervalRun whose file it takes
    traffic: str = ""  # traffics to run instead of equal sequences
    jump: int = 0  # tokens between jumps to another topic
    more: tuple[str, ...] = ()

    def quickly(self) -> "Run":
        """Returns a run with the same rows that takes seconds on any device."""
        if self.quality:
            return replace(self, contexts=(512,), more=("--quality-texts", "1", "--quality-steps", "8",
                                                        "--passkeys", "1"))
        windows = tuple(re.sub(r"window=(\d+)", lambda m: f"window={max(int(m[1]) // 32 // 32 * 32, 32)}", name)
                        for name in self.policies)
        return replace(self, policies=windows, contexts=tuple(max(c // 32, 512) for c in self.contexts),
                       steps=min(self.steps, 4), most=min(self.most, 8),
                       batches=tuple(min(b, 8) for b in self.batches), budget=256,
                       jump=self.jump and 6, layers=self.layers and 4, statistics=min(self.statistics, 4), dram_gib=1,
                       more=(*self.more, "--hgca-window", "64"))

    def _model(self, place: Place, quick: bool, folder: Path) -> Path:
        """Returns the model's folder. A model with fewer layers is made beside the results."""
        source = place.root / (SMALL if quick else self.model)
        if self.layers is None:
            return source
        made = folder / f"{source.name}-{self.layers}-layers"
        made.mkdir(parents=True, exist_ok=True)
        config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": self.layers}
        (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return made

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-bench policies, without the device and the output."""
        out = ["--policies", ",".join(self.policies), "--contexts", ",".join(map(str, self.contexts)),
               "--dense-layers", str(self.dense_layers), "--block-tokens", str(self.block_tokens),
               "--workers", str(max(len(os.sched_getaffinity(0)) - 2, 1)), *self.more]
        if self.quality:
            return [*out, "--model", str(place.smollm2), "--quality", "--texts", str(texts)]
        model = self._model(place, quick, folder)
        hbm = "auto"
        if self.full_sequences is not None:
            # A little more than `full` takes for that many sequences with their new tokens.
            tokens = max(self.contexts) + (WINDOWS + 1) * self.steps + SPARE_TOKENS + self.block_tokens
            hbm = f"{(int(self.full_sequences * tokens * token_bytes(model) * 1.005) + (1 << 20)) >> 20}MiB"
        out += ["--model", str(model), "--topic-drift", "--batches", ",".join(map(str, self.batches)),
                "--max-batch", str(self.most), "--hbm-bytes", hbm,
                "--dram-bytes", f"{self.dram_gib}GiB", "--budget", str(self.budget),
                "--steps", str(self.steps), "--distinct", str(self.distinct),
                "--statistics", str(self.statistics)]
        if self.given_batches:
            out.append("--given-batches")
        if self.traffic:
            out += ["--traffic", self.traffic, "--jump", str(self.jump)]
        if not self.trace:
            out.append("--no-trace")
        if self.drifts:
            out += ["--drift", ",".join(map(str, self.drifts))]
        if self.profile:
            out += ["--policy-profile", str(folder / f"{self.profile}.json")]
        return out


@dataclass(frozen=True)
class IntervalRun:
    """One call of sluice-profile that measures recall intervals on the topic-drift workload, for later runs."""

    name: str
    context: int
    model: str = LARGE
    prompts: int = 2
    steps: int = 32
    budget: int = 2048
    quality = False

    def quickly(self) -> "IntervalRun":
        """Returns a run that takes seconds, with the model, the context and the budget of Run.quickly."""
        return replace(self, model=SMALL, context=max(self.context // 32, 512), steps=8, budget=256)

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-profile, without the device and the output."""
        return ["--model", str(place.root / self.model), "--topic-drift", "--dense-layers", "0",
                "--context", str(self.context), "--prompts", str(self.prompts), "--steps", str(self.steps),
                "--budget-tokens", str(self.budget),
                "--workers", str(max(len(os.sched_getaffinity(0)) - 2, 1))]
# Topic drift in which heads turn at rates as different as a model's: with them a KV head of clo misses in a fifth of its
# lookups.
TURNING = ("--turning-heads", "0.4", "--turning", "0.35")
TURNING_DRIFT = 0.02


@dataclass(frozen=True)
class HeadsRun:
    """One call of sluice-profile that measures the heads of clo on that workload, for later runs."""

    name: str
    longest: int  # longest context of the later runs
    context: int = 8192
    model: str = LLAMA
    prompts: int = 2
    quality = False

    def quickly(self) -> "HeadsRun":
        """Returns a run that takes seconds, with the model and the context of Run.quickly."""
        return replace(self, model=SMALL, context=512, longest=max(self.longest // 32, 512))

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-profile, without the device and the output."""
        return ["--model", str(place.root / self.model), "--topic-drift", "--clo", "--no-intervals",
                "--context", str(self.context), "--drift-context", str(self.longest), "--prompts", str(self.prompts),
                "--steps", "16", "--drift", str(TURNING_DRIFT), *TURNING]


def token_bytes(model: Path) -> int:
    """Returns the bytes of K and V of one token in all layers, in bf16."""
    config = json.loads((model / "config.json").read_text())
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
