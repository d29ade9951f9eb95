"""tools/gpu-stage and tools/gpu-test: Sluice's CUDA tests and benches on a machine that builds nothing.

It uses the standard library alone, except to make SmolLM2's weights: a GPU machine may have nothing else.
"""
