"""tools/gpu-stage and tools/gpu-test: Sluice's CUDA tests and benches on a machine that builds nothing.

Standard library only, but for making SmolLM2's weights: a GPU machine may have no more.
"""
