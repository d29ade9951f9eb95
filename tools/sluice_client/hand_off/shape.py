"""The shape of an engine's caches, and whether a decode node can take them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineShape:
    """What a decode node must agree on, and how the ranks divide it."""

    engine: str  # its name, for people
    architecture: str
    layers: int
    kv_heads: int  # of all ranks; 1 for latent caches
    head_dim: int  # elements of one of them
    ranks: int
    replicas: int  # ranks in a row that hold the same heads
    max_context: int

    def heads_of(self, rank: int) -> tuple[int, int]:
        """Returns the heads that a rank holds, as a half-open range."""
        own = self.kv_heads * self.replicas // self.ranks
        return rank // self.replicas * own, (rank // self.replicas + 1) * own

    def sends(self, rank: int) -> bool:
        """Returns whether a rank sends its heads, since the first of the ranks with the same heads does."""
        return rank % self.replicas == 0


def check_node(shape: EngineShape, model, fingerprint: str, address: str) -> str:
    """Returns why the node at `address` cannot take the engine's caches, or the empty string.

    `model` is its ModelInfo; `fingerprint` is what it must be, or empty.
    """
    if fingerprint and fingerprint != model.fingerprint:
        return f"{address} has another model: its fingerprint is {model.fingerprint}, expected {fingerprint}"
    found = {"model_type": model.architecture, "number of layers": model.layers, "KV heads": model.kv_heads or 1}
    expected = {"model_type": shape.architecture, "number of layers": shape.layers, "KV heads": shape.kv_heads}
    if model.kv_heads:
        found["head_dim"], expected["head_dim"] = model.head_dim, shape.head_dim
    for name, value in expected.items():
        if found[name] != value:
            return f"{address} has another model: its {name} is {found[name]}, {shape.engine}'s {value}"
    return ""
