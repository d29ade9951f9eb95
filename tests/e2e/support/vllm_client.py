"""A client of vllm.grpc.engine.VllmEngine with the gateway's own messages, which are independent of ours."""

from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from support.nodes import TIMEOUT_S, Node

pb = vllm_engine_pb2
# The parameters that the gateway sends with a prefill leg.
HOLD = '{"do_remote_decode":true,"do_remote_prefill":false}'


def stub(node: Node) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(node.channel)


def request(prompt: list[int], sampling: dict | None = None, **fields) -> pb.GenerateRequest:
    """Returns a request as the gateway writes it; greedy unless `sampling` says otherwise."""
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
    """Reads a Generate to its end: chunks, and one complete message, which comes last."""
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
