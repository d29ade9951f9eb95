"""One client's misbehaviour does not disturb others: too much, too slow, or no protocol at all.

A stream that decodes meanwhile gives the same tokens, its p99 gap stays within a stated ratio of its gap alone in the
same run, and the node's memory within a stated bound.
"""

import contextlib
import resource
import socket
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from support.gaps import check_unnoticed, watch
from support.metrics_text import Scrape, wait_for
from support.nodes import SCALE, TIMEOUT_S
from support.raw_http2 import DATA, FRAME_BYTES, HEADERS, PREFACE, SETTINGS, Http2, connect, frame
from support.transfers import Transfer

MIB = 1 << 20
# Bounds of the ratio of p99 gaps: where the refusals take time of the same two cores, and where the clients only wait.
BUSY, IDLE = 4.0, 1.3


@pytest.fixture(scope="module")
def node(tiny_models, start):
    """A node with one thread that computes; the other core is for the clients. DRAM holds 10,000 blocks of 24 KiB."""
    return start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "16MiB", "--dram-bytes", "256MiB",
                 "--block-tokens", "16", "--threads", "1")


@pytest.fixture
def g(golden):
    return golden("tiny-llama")


@pytest.fixture(autouse=True)
def unharmed(node, g):
    before = node.settled()
    yield
    node.wait_until_held(before, 20 * SCALE)
    watch(node, g, 50)


@pytest.fixture(scope="module", autouse=True)
def file_descriptors():
    """Raises the limit of open files to what the system allows; the default of many systems is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def need_file_descriptors(count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < count:
        pytest.skip(f"{count} file descriptors are needed, the hard limit is {hard}")


def peak_bytes(node) -> int:
    """Returns the largest resident memory since reset_peak()."""
    for line in Path(f"/proc/{node.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def reset_peak(node) -> int:
    """Resets the peak and returns the resident memory now."""
    Path(f"/proc/{node.process.pid}/clear_refs").write_text("5")
    return peak_bytes(node)


def wait_until_rss_below(node, most: int) -> None:
    """Waits until memory is given back, which the allocator does some seconds after pages are free."""
    deadline = time.monotonic() + 30 * SCALE
    while (now := node.rss_bytes()) > most and time.monotonic() < deadline:
        time.sleep(0.1)
    assert now <= most, f"{now / MIB:.0f} MiB, at most {most / MIB:.0f} were expected"


@contextlib.contextmanager
def running(job, *args):
    """Runs `job` in a thread meanwhile; its exception is raised at the end."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(job, *args)
        yield
        future.result()


def report(capsys, name, figures):
    with capsys.disabled():
        print(f"\nbeside {name}: {figures}")


def test_a_manifest_of_2_gib_is_refused_and_nobody_notices(node, g, capsys):
    """gRPC gathers a message before it refuses its size. The memory comes back, and no other call ends."""
    before = node.rss_bytes()

    def send(size):
        client = Http2(node.address)
        client.call("/sluice.v1.KvIngest/Reserve")
        client.message(size, size)
        client.wait_for_end()
        client.close()

    send_all = ThreadPoolExecutor(1).submit(send, (2 << 30) - 1)
    while not send_all.done():
        watch(node, g, 200)
    send_all.result()
    wait_until_rss_below(node, before + 256 * MIB)
    report(capsys, "messages of 64 MiB", check_unnoticed(node, g, lambda: running(send, 64 * MIB), BUSY, tokens=1000))


def test_messages_that_never_end_cost_what_they_have_sent(node, g, capsys):
    before = node.rss_bytes()

    @contextlib.contextmanager
    def begun():
        clients = [Http2(node.address) for _ in range(50)]
        for client in clients:
            client.call("/sluice.v1.KvIngest/Write")
            client.message(2**32 - 1, MIB)
        yield
        for client in clients:
            client.close()

    figures = check_unnoticed(node, g, begun, IDLE, tokens=1000)
    report(capsys, "50 messages of 4 GiB that stop after 1 MiB", figures)
    wait_until_rss_below(node, before + 128 * MIB)


def test_a_compressed_bomb_is_not_unpacked(node, g):
    """Returns 1 GiB of zeros in 1 MiB of gzip."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(16 * MIB)
    # After a full flush a block depends on nothing before it, so that one block serves 64 times.
    head, block = (packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = head + 63 * block + packer.flush()
    assert len(bomb) < 2 * MIB
    before = reset_peak(node)
    for method in ("KvIngest/Reserve", "KvIngest/Write", "Decode/Generate"):
        client = Http2(node.address)
        client.call(f"/sluice.v1.{method}", grpc_encoding="gzip")
        client.message(len(bomb), len(bomb), compressed=True, body=bomb)
        client.wait_for_end()
        client.close()
    watch(node, g, 50)
    assert peak_bytes(node) < before + 64 * MIB


def test_10000_abandoned_reservations_are_forgotten(node, g, capsys):
    before = node.rss_bytes()
    transfer = Transfer(node, g, case=0, max_new_tokens=1, reserve=False)
    transfer.request.lease.CopyFrom(duration_pb2.Duration(seconds=int(15 * SCALE)))
    empty = node.settled()
    for _ in range(100):
        for call in [node.ingest.Reserve.future(transfer.request, timeout=TIMEOUT_S) for _ in range(100)]:
            call.result()
    opened = node.capacity().transfers
    assert opened > 5000  # all of them, unless it took longer than the lease of the first one
    assert node.rss_bytes() < before + 64 * MIB
    rounds = check_unnoticed(node, g, contextlib.nullcontext, IDLE, tokens=500)
    report(capsys, f"{opened} abandoned reservations", rounds)
    node.wait_until_held(empty, 30 * SCALE)


NOISE = {
    "nothing": b"", "half a preface": PREFACE[:11], "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "zeros": bytes(4096),
    "ones": b"\xff" * 4096, "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(60),
    "settings": PREFACE + frame(SETTINGS),
    "half a header": PREFACE + frame(SETTINGS) + frame(HEADERS, 4, 1, bytes(100))[:20],
    "headers without end": PREFACE + frame(SETTINGS) + frame(HEADERS, 0, 1, b"\0\1x\1y" * 2000),
    "bad headers": PREFACE + frame(SETTINGS) + frame(HEADERS, 4, 1, b"\xff" * 500),
    "data without call": PREFACE + frame(SETTINGS) + frame(DATA, 0, 7, bytes(FRAME_BYTES)),
    "an unknown frame": PREFACE + frame(SETTINGS) + frame(0xEE, 0xEE, 3, bytes(100)),
    "a frame of 16 MiB": PREFACE + frame(SETTINGS) + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(100),
    "even stream": PREFACE + frame(SETTINGS) + frame(HEADERS, 4, 2, b"\0\1x\1y"),
    "1,000 settings": PREFACE + frame(SETTINGS) * 1000,
}


def test_1000_idle_or_noisy_connections_change_nothing(node, g, capsys):
    need_file_descriptors(3000)
    before = node.rss_bytes()
    noises = list(NOISE.values())

    @contextlib.contextmanager
    def connected():
        sockets = [connect(node.address) for _ in range(1000)]
        for i, s in enumerate(sockets):
            with contextlib.suppress(OSError):  # the node may have closed it already
                s.sendall(noises[i % len(noises)])
        time.sleep(0.5)  # the noise costs time to read; an open connection must not
        yield
        assert node.rss_bytes() < before + 256 * MIB
        for s in sockets:
            s.close()

    report(capsys, "1,000 connections", check_unnoticed(node, g, connected, IDLE, tokens=1000))


def test_a_low_soft_limit_of_file_descriptors_is_raised(tiny_models, start, golden):
    """Lowers the limit to that of many systems, 1024, which is soon reached."""
    need_file_descriptors(1000)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit[1]))
    try:
        small = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    sockets = [connect(small.address) for _ in range(200)]
    watch(small, golden("tiny-llama"), 20)
    for s in sockets:
        s.close()
    assert small.stop() == 0


def greeted(s: socket.socket) -> bool:
    """Returns whether the node speaks on this connection; otherwise it has reset it."""
    try:
        return bool(s.recv(1))
    except ConnectionResetError:
        return False


def test_a_peer_has_so_many_connections_and_others_their_own(tiny_models, start, golden):
    few = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB",
                "--max-connections-per-peer", "8", "--max-connections", "12")
    host, port = few.address.rsplit(":", 1)

    def connect_from(address: str) -> socket.socket:
        s = socket.create_connection((host, int(port)), timeout=TIMEOUT_S, source_address=(address, 0))
        with contextlib.suppress(OSError):  # it may have been reset already
            s.sendall(PREFACE + frame(SETTINGS))
        return s

    def refused(address: str) -> bool:
        try:
            return not greeted(connect_from(address))
        except ConnectionResetError:  # on a busy machine the reset is there before connect() returns
            return True

    watch(few, golden("tiny-llama"), 20)
    one = wait_for(few, lambda now: now.get("sluice_connections") == 1, TIMEOUT_S)
    assert one.get("sluice_connections") == 1  # the channel by which this process reads metrics
    held = [connect_from("127.0.0.1") for _ in range(7)]
    assert all(greeted(s) for s in held)
    assert refused("127.0.0.1")
    others = [connect_from("127.0.0.2") for _ in range(4)]
    assert all(greeted(s) for s in others)
    assert refused("127.0.0.3")  # the limit is 12 connections for all together
    few.capacity()  # a caller with a connection keeps it
    now = Scrape(few)
    assert now.get("sluice_connections") == 12
    assert now.get("sluice_connections_refused_total", reason="peer") == 1
    assert now.get("sluice_connections_refused_total", reason="all") == 1
    log = few.log.read_text()
    assert "max_connections_per_peer" in log and "127.0.0.1" in log
    for s in held + others:
        s.close()
    assert wait_for(few, lambda now: now.get("sluice_connections") == 1, TIMEOUT_S).get("sluice_connections") == 1
    watch(few, golden("tiny-llama"), 20)


def test_a_node_without_file_descriptors_accepts_again_when_some_come_free(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB")
    watch(node, golden("tiny-llama"), 20)
    limit = len(list(Path(f"/proc/{node.process.pid}/fd").iterdir())) + 20
    resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    sockets = [connect(node.address) for _ in range(60)]  # the system holds those that wait
    deadline = time.monotonic() + TIMEOUT_S
    while "cannot be accepted" not in node.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for s in sockets:
        s.close()
    watch(node, golden("tiny-llama"), 20)
    s = connect(node.address)
    s.settimeout(TIMEOUT_S)
    s.sendall(PREFACE + frame(SETTINGS))
    assert greeted(s)
    s.close()
    assert Scrape(node).get("sluice_connections_refused_total", reason="system") >= 1
    assert node.stop() == 0


ADMIN_NOISE = [b"", b"GET /heal", b"\xff" * 1000, b"GET / HTTP/9.9\r\n\r\n", b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100_000,
               b"POST /healthz HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
               b"POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", b"\r\n" * 5000]


def test_noise_on_the_admin_port_keeps_nobody_out(node):
    sockets = []
    for i in range(400):
        sockets.append(connect(node.addresses["admin_listen"]))
        with contextlib.suppress(OSError):
            sockets[-1].sendall(ADMIN_NOISE[i % len(ADMIN_NOISE)])
        if i % 50 == 0:
            assert node.http("/healthz") == (200, "ok\n")
    assert node.http("/readyz")[0] == 200 and "sluice_" in node.http("/metrics")[1]
    for s in sockets:
        s.close()
