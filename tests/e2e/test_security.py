"""TLS, roles, tokens: every role and every stranger tries each door."""

import socket
import ssl
import time
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import (admin_pb2, admin_pb2_grpc, decode_pb2, decode_pb2_grpc, ingest_pb2,
                       ingest_pb2_grpc, prefill_pb2, prefill_pb2_grpc, source_pb2, source_pb2_grpc)
from sluice_client import rpc
from sluice_client.rpc import Credentials
from smg_grpc_proto import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from support.nodes import SCALE, SLUICE, TIMEOUT_S, error_of, greedy, run, tokens_of
from support.pki import ROLES, Pki, node_flags, token_entry, write_access

Code = grpc.StatusCode
TOKENS = {role: f"a-token-of-{role}-0123456789abcdef" for role in ROLES}
CERTIFICATES = [{"identity": f"cn:{role}-*", "roles": [role]} for role in ROLES]


class Town:
    """A decode and a prefill node over TLS, and the credentials of every caller."""

    def __init__(self, folder, start, model):
        self.pki = Pki(folder)
        self.access = write_access(folder / "access.json", certificates=[
            *CERTIFICATES, {"identity": "uri:spiffe://town/router/*", "roles": ["router"]}],
            tokens=[token_entry(role, token, role) for role, token in TOKENS.items()])
        self.decode = start("sluice-server", model, *node_flags(self.pki, self.access, "decode-0"),
                            "--log-level", "trace",
                            credentials=self.pki.credentials("operator-0"))
        self.prefill = start("sluice-prefill", model, *node_flags(self.pki, self.access, "prefill-0"),
                             credentials=self.pki.credentials("router-9"))
        self.by_certificate = {role: self.pki.credentials(f"{role}-1") for role in ROLES}
        self.by_token = {role: self.pki.bearer(token) for role, token in TOKENS.items()}

    def channel(self, credentials, node=None):
        return rpc.open_channel((node or self.decode).address, credentials)


@pytest.fixture(scope="module")
def town(tmp_path_factory, start, tiny_models):
    return Town(tmp_path_factory.mktemp("pki"), start, tiny_models("tiny-llama"))


UNKNOWN = "0" * 32
# Every method: the roles that may call it, and the status of an allowed call where it is not OK.
DOORS = {
    "KvIngest.Reserve": ({"prefill"}, ingest_pb2.ReserveRequest(), Code.INVALID_ARGUMENT),
    "KvIngest.Write": ({"prefill"}, ingest_pb2.WriteRequest(), Code.INVALID_ARGUMENT),
    "KvIngest.WriteByLink": ({"prefill"}, ingest_pb2.WriteByLinkRequest(), Code.INVALID_ARGUMENT),
    "KvIngest.Commit": ({"prefill"}, ingest_pb2.CommitRequest(transfer_id=UNKNOWN), Code.NOT_FOUND),
    "KvIngest.Abort": ({"prefill"}, ingest_pb2.AbortRequest(transfer_id=UNKNOWN), Code.OK),
    "KvIngest.GetTransfer": ({"prefill"}, ingest_pb2.GetTransferRequest(transfer_id=UNKNOWN), Code.NOT_FOUND),
    "Decode.Generate": ({"router"}, decode_pb2.GenerateRequest(transfer_id=UNKNOWN), Code.NOT_FOUND),
    "Decode.Cancel": ({"router"}, decode_pb2.CancelRequest(request_id="nobody"), Code.OK),
    "Decode.Forget": ({"router"}, decode_pb2.ForgetRequest(sequence_id=UNKNOWN), Code.OK),
    "Prefill.Run": ({"router"}, prefill_pb2.RunRequest(), Code.INVALID_ARGUMENT),
    "Prefill.GetModel": (set(ROLES), prefill_pb2.GetPrefillModelRequest(), Code.OK),
    "KvSource.AwaitPrompt": ({"decode"}, source_pb2.AwaitPromptRequest(room=5, reader="r"), Code.FAILED_PRECONDITION),
    "KvSource.Describe": ({"decode"}, source_pb2.DescribeRequest(source_id=UNKNOWN), Code.NOT_FOUND),
    "KvSource.Read": ({"decode"}, source_pb2.ReadRequest(source_id=UNKNOWN), Code.NOT_FOUND),
    "KvSource.ReadByLink": ({"decode"}, source_pb2.ReadByLinkRequest(
        read=source_pb2.ReadRequest(source_id=UNKNOWN)), Code.NOT_FOUND),
    "KvSource.Renew": ({"decode", "router"}, source_pb2.RenewRequest(source_id=UNKNOWN), Code.NOT_FOUND),
    "KvSource.Release": ({"decode", "router"}, source_pb2.ReleaseRequest(source_id=UNKNOWN), Code.OK),
    "VllmEngine.Generate": ({"router"}, vllm_engine_pb2.GenerateRequest(), Code.INVALID_ARGUMENT),
    "VllmEngine.Abort": ({"router"}, vllm_engine_pb2.AbortRequest(request_ids=["nobody"]), Code.OK),
    "VllmEngine.GetLoads": ({"router"}, vllm_engine_pb2.GetLoadsRequest(), Code.OK),
    "VllmEngine.GetModelInfo": (set(ROLES), vllm_engine_pb2.GetModelInfoRequest(), Code.OK),
    "VllmEngine.GetServerInfo": ({"router"}, vllm_engine_pb2.GetServerInfoRequest(), Code.OK),
    # Methods that a node without SGLang's gateway does not have: an allowed caller is told so.
    "SglangScheduler.Generate": ({"router"}, sglang_scheduler_pb2.GenerateRequest(), Code.UNIMPLEMENTED),
    "SglangScheduler.Abort": ({"router"}, sglang_scheduler_pb2.AbortRequest(request_id="nobody"), Code.UNIMPLEMENTED),
    "Admin.GetModel": (set(ROLES), admin_pb2.GetModelRequest(), Code.OK),
    "Admin.GetCapacity": ({"operator", "monitor"}, admin_pb2.GetCapacityRequest(), Code.OK),
    "Admin.ListSequences": ({"operator", "monitor"}, admin_pb2.ListSequencesRequest(), Code.OK),
    "Admin.ListFailpoints": ({"operator", "monitor"}, admin_pb2.ListFailpointsRequest(), Code.OK),
    "Admin.SetFailpoints": ({"operator"}, admin_pb2.SetFailpointsRequest(), Code.FAILED_PRECONDITION),
    "Admin.Resume": ({"operator"}, admin_pb2.ResumeRequest(), Code.OK),
    "Admin.Trace": ({"operator"}, admin_pb2.TraceRequest(), Code.OK),
    "Health.Check": (set(ROLES), health_pb2.HealthCheckRequest(), Code.OK),
}
STUBS = {"KvIngest": ingest_pb2_grpc.KvIngestStub, "Decode": decode_pb2_grpc.DecodeStub,
         "Prefill": prefill_pb2_grpc.PrefillStub, "KvSource": source_pb2_grpc.KvSourceStub,
         "VllmEngine": vllm_engine_pb2_grpc.VllmEngineStub,
         "SglangScheduler": sglang_scheduler_pb2_grpc.SglangSchedulerStub, "Admin": admin_pb2_grpc.AdminStub,
         "Health": health_pb2_grpc.HealthStub}


def code_of(town, credentials, door: str) -> grpc.StatusCode:
    service, method = door.split(".")
    node = town.prefill if service in ("Prefill", "KvSource") else town.decode
    request = DOORS[door][1]
    with town.channel(credentials, node) as channel:
        call = getattr(STUBS[service](channel), method)
        try:
            answer = call(iter([request]) if method in ("Write", "WriteByLink") else request, timeout=TIMEOUT_S)
            if hasattr(answer, "__next__"):
                list(answer)
        except grpc.RpcError as error:
            return error.code()
    return Code.OK


@pytest.mark.parametrize("door", DOORS)
def test_a_door_opens_for_its_roles_alone(town, door):
    roles, _, inside = DOORS[door]
    for role in ROLES:
        expected = inside if role in roles else Code.PERMISSION_DENIED
        assert code_of(town, town.by_certificate[role], door) == expected, f"certificate of {role}"
        assert code_of(town, town.by_token[role], door) == expected, f"token of {role}"


@pytest.mark.parametrize("door", DOORS)
def test_no_door_opens_for_somebody_unknown(town, door):
    assert code_of(town, Credentials(str(town.pki.ca)), door) == Code.UNAUTHENTICATED
    assert code_of(town, town.pki.bearer("a-token-that-nobody-gave"), door) == Code.UNAUTHENTICATED
    assert code_of(town, town.pki.credentials("stranger"), door) == Code.PERMISSION_DENIED


def test_a_refusal_says_who_lacks_which_role(town):
    with town.channel(town.by_certificate["prefill"]) as channel:
        error = error_of(lambda: admin_pb2_grpc.AdminStub(channel).Resume(admin_pb2.ResumeRequest()))
    assert error.details() == ("/sluice.v1.Admin/Resume needs one of the roles operator; cn:prefill-1 has prefill")


def test_a_uri_of_a_certificate_is_an_identity(town):
    credentials = town.pki.credentials("somebody", uri="spiffe://town/router/7")
    assert code_of(town, credentials, "Decode.Cancel") == Code.OK
    assert code_of(town, credentials, "Admin.Resume") == Code.PERMISSION_DENIED


def test_a_wrong_token_is_not_saved_by_a_good_certificate(town):
    good = town.by_certificate["operator"]
    both = Credentials(good.ca, good.cert, good.key, "a-wrong-token")
    assert code_of(town, both, "Admin.Resume") == Code.UNAUTHENTICATED


OUTSIDE = {
    "an expired certificate": lambda t: t.pki.credentials(
        "operator-8", days=("20200101000000Z", "20200201000000Z"), under="expired"),
    "a certificate of later": lambda t: t.pki.credentials(
        "operator-8", days=("20990101000000Z", "20990201000000Z"), under="later"),
    "another authority's certificate": lambda t: Credentials(
        str(t.pki.ca), *map(str, Pki(t.pki.folder / "other").issue("operator-0"))),
    "a certificate that signed itself": lambda t: Credentials(
        str(t.pki.ca), str(Pki(t.pki.folder / "self", "operator-0").ca), str(t.pki.folder / "self/operator-0.key")),
    "an authority that did not issue the node's": lambda t: Credentials(
        str(Pki(t.pki.folder / "elsewhere").ca), t.by_certificate["operator"].cert, t.by_certificate["operator"].key),
}


@pytest.mark.parametrize("who", OUTSIDE)
def test_a_certificate_that_does_not_hold_ends_the_handshake(town, who):
    assert code_of(town, OUTSIDE[who](town), "Admin.GetModel") == Code.UNAVAILABLE
    assert code_of(town, town.by_certificate["operator"], "Admin.GetModel") == Code.OK


def test_plain_text_to_a_tls_port_gets_no_answer(town):
    with grpc.insecure_channel(town.decode.address) as channel:
        error = error_of(lambda: admin_pb2_grpc.AdminStub(channel).GetModel(
            admin_pb2.GetModelRequest(), timeout=TIMEOUT_S))
    assert error.code() == Code.UNAVAILABLE
    assert code_of(town, town.by_certificate["operator"], "Admin.GetModel") == Code.OK


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1], ids=["1.0", "1.1"])
@pytest.mark.parametrize("port", ["listen", "admin_listen"])
def test_old_versions_of_tls_are_refused(town, version, port):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    host, _, number = town.decode.addresses[port].rpartition(":")
    with socket.create_connection((host, int(number)), timeout=TIMEOUT_S) as plain, pytest.raises(OSError):
        context.wrap_socket(plain)


def test_half_a_handshake_is_ended_in_time(town):
    started = time.monotonic()
    opened = []
    for port in ("listen", "admin_listen"):
        host, _, number = town.decode.addresses[port].rpartition(":")
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):  # nothing, and half of a hello
            opened += [socket.create_connection((host, int(number)), timeout=TIMEOUT_S) for _ in range(10)]
            for s in opened[-10:]:
                s.sendall(sent)
    assert code_of(town, town.by_certificate["operator"], "Admin.GetModel") == Code.OK  # others are served meanwhile
    for s in opened:
        s.settimeout(TIMEOUT_S)
        try:
            while s.recv(4096):  # an alert may come first
                pass
        except ConnectionResetError:
            pass
        s.close()
    assert time.monotonic() - started < 15 * SCALE


def test_oversized_metadata_ends_its_call_alone(town):
    with town.channel(town.by_certificate["operator"]) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        error = error_of(lambda: admin.GetModel(admin_pb2.GetModelRequest(), timeout=TIMEOUT_S,
                                                metadata=[("x-large", "y" * 50_000)]))
        assert error.code() == Code.RESOURCE_EXHAUSTED
    huge = town.pki.bearer("t" * 50_000)
    assert code_of(town, huge, "Admin.GetModel") == Code.RESOURCE_EXHAUSTED
    assert code_of(town, town.by_certificate["operator"], "Admin.GetModel") == Code.OK


def http(town, path: str, credentials=None, token: str = "") -> int:
    context = ssl.create_default_context(cafile=str(town.pki.ca))
    if credentials is not None:
        context.load_cert_chain(credentials.cert, credentials.key)
    request = urllib.request.Request(f"https://{town.decode.addresses['admin_listen']}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_admin_port_lets_probes_in_and_metrics_by_role(town):
    assert http(town, "/healthz") == http(town, "/readyz") == 200
    assert http(town, "/metrics") == http(town, "/metrics", token="unknown") == 401
    for role in ROLES:
        expected = 200 if role in ("operator", "monitor") else 403
        assert http(town, "/metrics", town.by_certificate[role]) == expected, role
        assert http(town, "/metrics", token=TOKENS[role]) == expected, role
    with pytest.raises(OSError):
        http(town, "/healthz", Pki(town.pki.folder / "other-admin").credentials("operator-0"))
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{town.decode.addresses['admin_listen']}/healthz", timeout=TIMEOUT_S)


def generate_flags(town, credentials) -> list:
    return ["--prefill", town.prefill.address, "--decode", town.decode.address, "--ca", credentials.ca,
            "--cert", credentials.cert, "--key", credentials.key]


@pytest.mark.parametrize("way", ["push", "pull"])
def test_prefill_hands_over_and_decode_answers_over_tls(town, golden, way):
    expected = golden("tiny-llama").tokens(0)
    prompt = ",".join(map(str, golden("tiny-llama").prompt(0)))
    done = run(SLUICE, "generate", *generate_flags(town, town.by_certificate["router"]), "--prompt-ids", prompt,
               "--max-tokens", len(expected), "--ignore-eos", "--json", *(["--pull"] if way == "pull" else []))
    assert done.returncode == 0, done.stderr
    assert f'"output_ids": {expected}' in done.stdout
    done = run(SLUICE, "status", "--decode", town.decode.address, "--ca", town.pki.ca, "--json",
               "--token", TOKENS["router"])
    assert done.returncode == 1 and "PERMISSION_DENIED" in done.stderr


def test_a_node_without_the_role_to_pull_says_why_it_cannot(town, start, tiny_models, golden):
    reader = start("sluice-server", tiny_models("tiny-llama"), *node_flags(town.pki, town.access, "router-7"),
                   credentials=town.pki.credentials("operator-0"))
    prompt = ",".join(map(str, golden("tiny-llama").prompt(0)))
    flags = generate_flags(town, town.by_certificate["router"])
    flags[flags.index("--decode") + 1] = reader.address
    done = run(SLUICE, "generate", *flags, "--pull", "--prompt-ids", prompt, "--max-tokens", "4", "--json")
    assert done.returncode == 1 and "needs one of the roles decode; cn:router-7 has router" in done.stderr, done.stderr


def test_no_secret_is_in_the_log(town):
    code_of(town, town.by_token["operator"], "Admin.GetCapacity")
    code_of(town, town.pki.bearer("a-wrong-token-that-stays-secret"), "Admin.GetCapacity")
    for node in (town.decode, town.prefill):
        log = node.log.read_text()
        assert "a-token-of-" not in log and "stays-secret" not in log and "PRIVATE KEY" not in log


def until(town, credentials, code: grpc.StatusCode) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while code_of(town, credentials, "Admin.GetModel") != code:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_certificates_and_rules_change_under_a_running_stream(town, golden):
    """New certificates and rules count for new connections and calls, while the stream goes on. This is the last test,
    because nothing is put back.
    """
    prompt = golden("tiny-llama").prompt(0)
    with (town.channel(town.by_certificate["router"], town.prefill) as prefill_channel,
          town.channel(town.by_certificate["router"]) as channel):
        transfer = prefill_pb2_grpc.PrefillStub(prefill_channel).Run(prefill_pb2.RunRequest(
            prompt_token_ids=prompt, decode_address=town.decode.address,
            sampling=greedy(max_tokens=3000, ignore_eos=True)), timeout=TIMEOUT_S).transfer_id
        stream = decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.GenerateRequest(
            transfer_id=transfer, sampling=greedy(max_tokens=3000, ignore_eos=True)))
        first = next(iter(stream))
        new = Pki(town.pki.folder / "rotated")
        cert, key = new.issue("decode-0")
        bundle = town.pki.ca.read_text()
        town.pki.ca.write_text(bundle + new.ca.read_text())
        (town.pki.folder / "decode-0.key").write_text(key.read_text())
        (town.pki.folder / "decode-0.pem").write_text(cert.read_text())
        write_access(town.access, certificates=CERTIFICATES)  # no token is valid any more
        only_new = new.credentials("operator-5")
        until(town, only_new, Code.OK)
        until(town, town.by_token["operator"], Code.UNAUTHENTICATED)
        context = ssl.create_default_context(cafile=str(new.ca))
        url = f"https://{town.decode.addresses['admin_listen']}/healthz"
        assert urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context).status == 200
        # A broken file changes nothing.
        town.access.write_text("{")
        deadline = time.monotonic() + TIMEOUT_S
        while "the rules before it stay" not in town.decode.log.read_text():  # the files are looked at when a call comes
            assert code_of(town, only_new, "Admin.GetModel") == Code.OK and time.monotonic() < deadline
            time.sleep(0.2)
        assert code_of(town, only_new, "Admin.GetModel") == Code.OK
        tokens, finish = tokens_of(stream)
        assert len(first.tokens) + len(tokens) == 3000
