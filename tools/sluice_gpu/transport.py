"""Calls of `sluice-link-bench`: caches over a link between two GPUs, pulls and pushes over it, beside NCCL's own and gRPC."""

from dataclasses import dataclass, replace
from pathlib import Path

from sluice_gpu import machine
from sluice_gpu.place import Place


@dataclass(frozen=True)
class TransportRun:
    """One call of sluice-link-bench. With fewer than two GPUs, two processes share one: a rehearsal."""

    name: str
    part: str
    tokens: int = 32768
    message_mib: int = 8
    ranks: int = 1  # of the node that receives
    rounds: int = 5
    quality = False

    def quickly(self) -> "TransportRun":
        """Returns a run that takes seconds on any device."""
        return replace(self, tokens=1024, rounds=1)

    def report(self, folder: Path) -> Path:
        """Returns a file that is not written: the bench prints its figures."""
        return folder / self.name / "link.json"

    def command(self, place: Place, device: str, quick: bool, folder: Path) -> list[str]:
        gpus = ["--devices", "0,1"] if device == "cuda" and machine.gpus() > 1 else []
        return [str(place.bin / "sluice-link-bench"), "--device", device, "--tokens", str(self.tokens),
                "--message-mib", str(self.message_mib), "--rounds", str(self.rounds), "--part", self.part,
                "--ranks", str(self.ranks), *gpus]


# Caches of 32K tokens of Llama-3-8B, 4.3 GB. A node's links, and so pulls and pushes, have messages of 32 MiB over NCCL.
TRANSPORT_PARTS = {"kv-transport": [TransportRun("link-8", "link"), TransportRun("link-32", "link", message_mib=32),
                                    TransportRun("pull", "pull"), TransportRun("push", "push"),
                                    TransportRun("pull-ranks", "pull", ranks=4), TransportRun("push-ranks", "push", ranks=4)]}
