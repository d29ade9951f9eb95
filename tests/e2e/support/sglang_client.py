"""A client of sglang.grpc.scheduler.SglangScheduler with the gateway's own messages, which are independent of ours."""

from smg_grpc_proto.generated import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc
from support.nodes import TIMEOUT_S, Node
from support.vllm_client import Answer, answer_of

pb = sglang_scheduler_pb2


def stub(node: Node) -> sglang_scheduler_pb2_grpc.SglangSchedulerStub:
    return sglang_scheduler_pb2_grpc.SglangSchedulerStub(node.channel)


def room(prefill: Node, number: int) -> pb.DisaggregatedParams:
    """Returns the place where smg lets the two legs meet. smg was told that the prefill node's bootstrap port is its
    gRPC port.
    """
    host, _, port = prefill.address.rpartition(":")
    return pb.DisaggregatedParams(bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=number)


def request(prompt: list[int], sampling: dict | None = None, **fields) -> pb.GenerateRequest:
    """Returns a request as the gateway writes it; greedy unless `sampling` says otherwise."""
    params = {"temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1, "n": 1, **(sampling or {})}
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=pb.SamplingParams(**params),
                              **{"logprob_start_len": -1, **fields})


def start(node: Node, prompt: list[int], sampling: dict | None = None, **fields):
    """Starts a call, beside which others may run; answer_of() reads it to its end."""
    return stub(node).Generate(request(prompt, sampling, **fields), timeout=TIMEOUT_S)


def generate(node: Node, prompt: list[int], sampling: dict | None = None, **fields) -> Answer:
    return answer_of(start(node, prompt, sampling, **fields))
