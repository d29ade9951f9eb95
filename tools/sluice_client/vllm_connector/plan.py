"""What the scheduler's half of the connector tells the ranks' halves in a step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from sluice_client.hand_off.parts import Part


@dataclass(frozen=True)
class Held:
    """A prompt that vLLM has computed and that a decode node will read."""

    request_id: str
    source_id: str
    tenant: str
    digest: str
    context_length: int
    blocks: tuple[int, ...]


@dataclass
class StepPlan(KVConnectorMetadata):
    parts: list[Part] = field(default_factory=list)
    # Requests whose last part has been planned, and whose blocks vLLM keeps until they are sent.
    ended: list[str] = field(default_factory=list)
    # Prompts whose end this step computes, and that are held from its end on.
    held: list[Held] = field(default_factory=list)
    # Requests that are given up. Their blocks may be another request's from this step on.
    dropped: list[str] = field(default_factory=list)


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """Why ranks could not send what was theirs, by request."""

    errors: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: "RankReport") -> "RankReport":
        return RankReport({**other.errors, **self.errors})
