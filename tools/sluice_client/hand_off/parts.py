"""What a process that reserves a transfer tells those that send into it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The transfer into which a prompt's caches go."""

    decode: str
    transfer_id: str
    context_length: int
    max_chunk_bytes: int
    cached_tokens: int = 0  # leading tokens that the decode node has already
    block_tokens: int = 1  # of the decode node: chunks begin at a block
    # Addresses of the decode node's ranks that take heads [begin, end) themselves.
    rank_ports: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Part:
    """The tokens [begin, end) of a prompt, which the engine's blocks have when it has computed a layer."""

    request_id: str
    target: Target
    begin: int
    end: int
    blocks: tuple[int, ...]  # the engine's block numbers, from the prompt's first token on
