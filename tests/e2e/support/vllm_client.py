"""A client of vllm.grpc.engine.VllmEngine by the gateway's own messages, independent of ours."""

from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from support.nodes import TIMEOUT_S, Node

pb = vllm_engine_pb2
# What the gateway sends with a prefill leg.
HOLD = '{"do_remote_decode":true,"do_remote_prefill":false}'


def stub(node: Node) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(node.channel)


def request(prompt: list[int], sampling: dict | None = None, **fields) -> pb.GenerateRequest:
    """As the gateway writes it; greedy unless `sampling` says otherwise."""
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), **fields,
                              sampling_params=pb.SamplingParams(**{"temperature": 0, **(sampling or {})}))


@dataclass
class Answer:
    complete: pb.GenerateComplete
    chunks: list = field(default_factory=list)

    @property
    def streamed(self) -> list[int]:
        return [i for chunk in self.chunks for i in chunk.token_ids]


def answer_of(stream) -> Answer:
    """A Generate to its end: chunks, and one complete message, which comes last."""
    chunks, complete = [], None
    for message in stream:
        assert complete is None
        if message.HasField("chunk"):
            chunks.append(message.chunk)
        else:
            complete = message.complete
    assert complete is not None
    return Answer(complete, chunks)


def generate(node: Node, prompt: list[int], sampling: dict | None = None, **fields) -> Answer:
    return answer_of(stub(node).Generate(request(prompt, sampling, **fields), timeout=TIMEOUT_S))
